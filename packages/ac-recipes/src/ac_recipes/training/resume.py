"""Opening the folder of a run: a new one, or that of the run to go on with, unless the recipe does not continue it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ac_recipes.errors import UsageError
from ac_recipes.reader import RecipeError, read_recipe, to_plain
from ac_recipes.recipe import Recipe
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.console import RunConsole
from ac_recipes.training.manifest import Checkpoint
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.saving import Saver

FIXED = (
    "model", "peft", "dataset", "packed_sequence", "tokenizer", "freeze_config", "rng",
    "step_scheduler.global_batch_size",
)  # fmt: skip
"""Sections and fields that the weights and the data order of a run hang on. Everything else may change: the policy of
activation checkpointing, the strategy, the number of ranks and of steps, the optimizer's settings."""


def find_run(recipe: Recipe, name: str, folder: str | None = None) -> Path:
    """The run folder to resume: `folder`, or without one the newest run of the recipe called `name`.

    Raises:
        UsageError: there is no such run, it has no whole checkpoint, or it trained another model or other data.
    """
    if folder is not None:
        run = RunFolder(Path(folder))
        if not run.recipe.is_file():
            raise UsageError(f"--resume: {folder} is not the folder of a run (it holds no recipe.yaml)")
        if not whole_checkpoints(run.checkpoints):
            raise UsageError(f"--resume: {folder} holds no whole checkpoint; start the run anew, without --resume")
    else:
        newest = RunFolder.newest(Path(recipe.run.dir), name)
        if newest is None:
            raise UsageError(
                f"--resume: no run of '{name}' under {recipe.run.dir} has a whole checkpoint; start it without --resume"
            )
        run = newest
    done, asked = whole_checkpoints(run.checkpoints)[-1].step, recipe.step_scheduler.max_steps
    if asked < done:
        raise UsageError(f"--resume: {run.path} has done {done} steps, more than step_scheduler.max_steps {asked}")
    differing = changes(run, recipe)
    strategies = {recipe.distributed.strategy, *(was for path, was, _ in differing if path == "distributed.strategy")}
    if "megatron_fsdp" in strategies:
        raise UsageError(
            "--resume: with strategy 'megatron_fsdp' the optimizer's state is not restored exactly, so such a run "
            "cannot go on; start it anew, or train with strategy 'fsdp2'"
        )
    another = "" if folder else ", go on with another run of this recipe (--resume RUN, the folder of it),"
    for path, was, now in differing:
        if path in FIXED or path.partition(".")[0] in FIXED:
            raise UsageError(
                f"--resume: {path} was {was!r} in {run.path} and is now {now!r}; a run goes on with the same "
                f"{', '.join(FIXED)}. Set it back{another} or start a new run"
            )
    return run.path


def open_run(recipe: Recipe, name: str, resume: Path | None, ranks: Ranks, console: RunConsole) -> RunFolder:
    """The run's folder: a new one made by rank 0, or the resumed one, with what has changed since.

    Raises:
        UsageError: it cannot be made, or another node does not see it.
    """
    if resume is None:
        path = RunFolder.create(Path(recipe.run.dir), name, recipe).path if ranks.is_first else None
        run = RunFolder(Path(str(ranks.from_first(path))))
    else:
        run = RunFolder(resume)
        if ranks.is_first:
            for field, was, now in changes(run, recipe):
                console.line(f"changed since the run was last started: {field}: {was} -> {now}")
    blind = [rank for rank, sees in enumerate(ranks.gather(run.recipe.is_file())) if not sees]
    if blind:
        raise UsageError(
            f"run.dir: rank {blind[0]} does not see {run.path}, which rank 0 has; the folder of a run has to be on a "
            "file system that all nodes share"
        )
    return run


def go_on(run: RunFolder, recipe: Recipe, saver: Saver, ranks: Ranks, console: RunConsole) -> Checkpoint:
    """Load the newest sound checkpoint of `run`, and forget what came after it; returns that checkpoint.

    Raises:
        RunError: there is none.
    """
    resumed = saver.resume()
    if ranks.is_first:
        run.write_recipe(recipe)
        run.drop_metrics_after(resumed.step)
    if resumed.step >= recipe.step_scheduler.max_steps:
        console.line(
            f"nothing left to do: step_scheduler.max_steps is {recipe.step_scheduler.max_steps}; raise it to go on"
        )
    return resumed


def changes(run: RunFolder, recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """Every field in which `recipe` differs from the one that the run was trained with: `(path, was, is)`. Where new
    runs are made says nothing of this one, which stays where it is.

    Raises:
        UsageError: the run's recipe cannot be read.
    """
    try:
        before = to_plain(read_recipe(Recipe, run.recipe))
    except RecipeError as error:
        raise UsageError(f"--resume: the run's own recipe cannot be read any more: {error}") from error
    return [change for change in _differences(before, to_plain(recipe), "") if change[0] != "run.dir"]


def _differences(was: Any, now: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in was | now:
            yield from _differences(was.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif was != now:
        yield path, was, now
