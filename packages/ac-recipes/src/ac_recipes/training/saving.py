"""Writing checkpoints, keeping the right ones, and going on from the newest sound one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.optim import Optimizer

from ac_recipes.errors import RunError
from ac_recipes.training import retention
from ac_recipes.training.checkpoint import (
    RunState,
    discard_partial,
    found_checkpoints,
    judge,
    load_checkpoint,
    save_alone,
    save_checkpoint,
    whole_checkpoints,
)
from ac_recipes.training.config import CheckpointConfig
from ac_recipes.training.console import RunConsole
from ac_recipes.training.faults import Faults, reason_of
from ac_recipes.training.manifest import Checkpoint, damage
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder


@dataclass(kw_only=True)
class Saver:
    """The checkpoints of one run, in `folder`. Every method is called by all ranks alike.

    newest: steps that the newest one has done, of those that were written or loaded here; 0 without any.
    """

    config: CheckpointConfig
    folder: Path
    ranks: Ranks
    console: RunConsole
    faults: Faults
    model: nn.Module
    optimizer: Optimizer
    newest: int = 0

    def save(self, step: int, validation_loss: float | None) -> Path:
        """Write the checkpoint of `step`, then delete those that it supersedes.

        Raises:
            RunError: it cannot be written, or the run's folder is gone; the older ones are kept.
        """
        RunFolder(self.folder.parent).check_there()
        state = RunState.of(self.model, self.optimizer)
        try:
            with self._whole_or_absent(step, self.ranks):
                path = save_checkpoint(self.folder, step, state, self.ranks, validation_loss)
        except (OSError, RuntimeError, MemoryError, CheckpointException) as error:
            raise self.faults.not_saved(error, step) from error
        self.newest = step
        if self.ranks.is_first:
            for checkpoint in retention.superseded(whole_checkpoints(self.folder), self.config):
                retention.remove(checkpoint)
        return path

    def rescue(self, step: int, state: RunState, ranks: Ranks) -> None:
        """Write `state` as the checkpoint of `step` after a failure, and delete none for it. `ranks`: that can still
        communicate.

        Raises:
            CheckpointException, OSError, RuntimeError, MemoryError: it cannot be written, or the run's folder is gone.
        """
        RunFolder(self.folder.parent).check_there()
        with self._whole_or_absent(step, ranks):
            save_checkpoint(self.folder, step, state, ranks)
        self.newest = step

    def rescue_alone(self, step: int, state: RunState) -> None:
        """As `rescue`, by a rank that has the whole state and can communicate with no other."""
        RunFolder(self.folder.parent).check_there()
        save_alone(self.folder, step, state, self.ranks.device)
        self.newest = step

    def resume(self) -> Checkpoint:
        """Load the newest checkpoint whose checksums are right, and tell which newer ones are damaged.

        Raises:
            RunError: there is none.
        """
        if self.ranks.is_first:
            discard_partial(self.folder)
        found = self.ranks.from_first(found_checkpoints(self.folder))
        damages: list[str] = []
        for candidate in reversed(found):
            wrong = candidate if isinstance(candidate, str) else self._damage(candidate)
            if wrong is None:
                for told in damages:
                    self.console.line(f"damaged checkpoint: {told}; falling back to the older {candidate.path}")
                try:
                    load_checkpoint(candidate, self.model, self.optimizer)
                except CheckpointException as error:  # on all ranks alike
                    damages.append(f"{candidate.path} cannot be loaded ({reason_of(error)})")
                    continue
                self.newest = candidate.step
                self.console.line(f"resumed from {candidate.path}, {candidate.step} steps done")
                return candidate
            damages.append(wrong)
        told = f": {'; '.join(damages)}" if damages else ""
        raise RunError(f"{self.folder} holds no sound checkpoint to resume from{told}; start the run anew")

    def judge(self, checkpoint: Checkpoint, validation_loss: float) -> None:
        """Keep the validation loss of a checkpoint that was saved without. Raises OSError: it cannot be written."""
        if self.ranks.is_first:
            judge(checkpoint, validation_loss)

    def tell_best(self) -> None:
        """Name the checkpoint of the lowest validation loss, where a run was asked to keep it."""
        if self.config.keep_best and (best := retention.best(whole_checkpoints(self.folder))):
            self.console.line(f"best checkpoint {best[0].path}, validation loss {best[0].validation_loss:.4f}")

    @contextmanager
    def _whole_or_absent(self, step: int, ranks: Ranks) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, MemoryError, CheckpointException):
            if ranks.is_first:
                discard_partial(self.folder, step)
            raise

    def _damage(self, checkpoint: Checkpoint) -> str | None:
        shares = self.ranks.gather(damage(checkpoint, self.ranks.rank, self.ranks.world_size))
        return next((share for share in shares if share is not None), None)
