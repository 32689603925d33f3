"""Sending the figures of a run to TensorBoard and Weights & Biases. Neither is loaded unless a recipe asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ac_recipes.errors import UsageError
from ac_recipes.extras import install_extra

if TYPE_CHECKING:
    from ac_recipes.recipe import Recipe


class Tracker(Protocol):
    """Keeps figures by step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """The `values` after `step` steps, by name."""

    def close(self, *, failed: bool) -> None:
        """Write out what is not yet written. `failed`: the run ended with an error."""


def check_trackers(recipe: "Recipe") -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        UsageError: naming the section, the package and the command that installs it.
    """
    for name in ("tensorboard", "wandb"):
        if getattr(recipe, name) is not None and find_spec(name) is None:
            raise UsageError(
                f"{name}: the package {name} is not installed; {install_extra(name)}, or leave the section out"
            )


@contextmanager
def open_trackers(recipe: "Recipe", run: Path, *, done: int) -> Iterator[list[Tracker]]:
    """The trackers that `recipe` asks for, in the run folder `run`, of which `done` steps are done already.

    Raises:
        UsageError: one cannot be started.
    """
    trackers: list[Tracker] = []
    failed = True
    try:
        if recipe.tensorboard is not None:
            from ac_recipes.trackers.tensorboard import TensorBoardTracker

            trackers.append(TensorBoardTracker(recipe.tensorboard, run, done=done))
        if recipe.wandb is not None:
            from ac_recipes.trackers.wandb import WandbTracker

            trackers.append(WandbTracker(recipe.wandb, recipe, run))
        yield trackers
        failed = False
    finally:
        for tracker in trackers:
            tracker.close(failed=failed)
