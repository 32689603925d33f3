"""A recipe that trains in seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ac_recipes.reader import read_recipe
from ac_recipes.recipe import Recipe

TINY = """\
model:
  config:
    model_type: llama
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
distributed:
  activation_checkpointing: true
dataset:
  text: [{text}]
  sequence_length: 16
  validation_fraction: 0.1
tokenizer: {{vocab_size: 300}}
optimizer: {{lr: 5.0e-3}}
lr_scheduler: {{lr_warmup_steps: 2}}
step_scheduler:
  global_batch_size: 4
  local_batch_size: 2
  max_steps: 6
  val_every_steps: 3
  ckpt_every_steps: 2
  log_every_steps: 1
run: {{dir: {runs}}}
"""


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"The square of {n} is {n * n}, and its double is {2 * n}.\n" for n in range(60)))
    return path


@pytest.fixture
def tiny_file(tmp_path: Path, text_file: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.format(text=text_file, runs=tmp_path / "runs"))
    return path


@pytest.fixture
def tiny(tiny_file: Path) -> Callable[..., Recipe]:
    """The tiny recipe; `tiny("section.field=value", ...)` with overrides."""
    from ac_recipes.reader import fields_of, split_overrides

    def build(*settings: Any) -> Recipe:
        _, overrides = split_overrides([f"--{setting}" for setting in settings], fields_of(Recipe))
        return read_recipe(Recipe, tiny_file, overrides)

    return build


SMALL = (
    "--model.config.hidden_size=64",
    "--model.config.intermediate_size=176",
    "--model.config.num_hidden_layers=3",
    "--dataset.sequence_length=128",
    "--tokenizer.vocab_size=300",
)
"""The default recipe, small enough for a test, and large enough that activations matter."""


@pytest.fixture
def small_arguments() -> list[str]:
    """The command line of the default recipe with small sizes."""
    return ["default", *SMALL]


@pytest.fixture
def small() -> Callable[..., Recipe]:
    """The default recipe with small sizes; `small("section.field=value", ...)` with overrides."""
    from ac_recipes.load import load_recipe
    from ac_recipes.reader import fields_of, split_overrides

    def build(*settings: str) -> Recipe:
        _, overrides = split_overrides([*SMALL, *(f"--{setting}" for setting in settings)], fields_of(Recipe))
        return load_recipe("default", overrides)

    return build


@pytest.fixture(scope="session")
def small_plan() -> Any:
    """A plan for the small recipe on a CPU, for 0.7 of what it takes without checkpointing."""
    from ac_recipes.analysis.planning import make_plan
    from ac_recipes.analysis.policies import budget_policy
    from ac_recipes.load import load_recipe
    from ac_recipes.reader import split_overrides

    recipe = load_recipe("default", split_overrides(SMALL)[1])
    return make_plan(recipe, budget_policy(recipe.distributed.checkpointing, 0.7), device="cpu")
