"""Scalars and the recipe for Weights & Biases."""

import uuid
from pathlib import Path

from ac_recipes.errors import UsageError
from ac_recipes.reader import to_plain
from ac_recipes.recipe import Recipe
from ac_recipes.trackers.config import WandbConfig


class WandbTracker:
    """One W&B run a run folder: `wandb-id.txt` in it lets a resumed run go on with the same one.

    Steps that a killed run had logged beyond its last checkpoint are not sent twice: W&B takes only growing steps.
    """

    def __init__(self, config: WandbConfig, recipe: Recipe, run: Path) -> None:
        import wandb

        kept_id = run / "wandb-id.txt"
        if not kept_id.exists():
            kept_id.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or run.name,
                group=config.group,
                tags=config.tags,
                notes=config.notes,
                dir=config.save_dir or str(run),
                mode=config.mode,
                id=kept_id.read_text(encoding="utf-8"),
                resume="allow",
                config=to_plain(recipe),
                settings=wandb.Settings(console="off"),  # it would otherwise wrap standard output, and the live line
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())[:300]
            raise UsageError(
                f"wandb: the run cannot be started: {reason}; log in with `wandb login`, or set wandb.mode to offline"
            ) from error

    def log(self, step: int, values: dict[str, float]) -> None:
        """All values of one step."""
        self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        """Send or write out what is left."""
        self._run.finish(exit_code=int(failed))
