"""A recipe that trains in seconds."""

from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

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

TEXT = "".join(f"The square of {n} is {n * n}, and its double is {2 * n}.\n" for n in range(60))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
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


class Trained(NamedTuple):
    """A run's folder, and what it printed."""

    run: Path
    out: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """`trained("section.field=value", ...)`: the tiny recipe with overrides, trained once a module. To be looked at."""
    from ac_recipes.reader import split_overrides
    from ac_recipes.training.trainer import train

    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    (folder / "tiny.yaml").write_text(TINY.format(text=folder / "text.txt", runs=folder / "runs"))

    @cache
    def run(*settings: str) -> Trained:
        recipe = read_recipe(Recipe, folder / "tiny.yaml", split_overrides([f"--{each}" for each in settings])[1])
        with redirect_stdout(StringIO()) as out:
            folder_of_run = train(recipe, "tiny").run
        return Trained(folder_of_run, out.getvalue())

    return run


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
