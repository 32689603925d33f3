"""The default recipe, small enough for a test, and large enough that activations matter."""

from collections.abc import Callable

import pytest

from ac_recipes.load import load_recipe
from ac_recipes.reader import split_overrides
from ac_recipes.recipe import Recipe

SMALL = (
    "model.config.hidden_size=64",
    "model.config.intermediate_size=176",
    "model.config.num_hidden_layers=3",
    "dataset.sequence_length=128",
    "tokenizer.vocab_size=300",
)


@pytest.fixture
def small() -> Callable[..., Recipe]:
    """The default recipe with small sizes; `small("section.field=value", ...)` with overrides."""

    def build(*settings: str) -> Recipe:
        _, overrides = split_overrides([f"--{setting}" for setting in (*SMALL, *settings)])
        return load_recipe("default", overrides)

    return build
