"""Scalars for TensorBoard, through torch's own writer."""

from pathlib import Path

from ac_recipes.errors import UsageError
from ac_recipes.trackers.config import TensorBoardConfig


class TensorBoardTracker:
    """One event file each time a run is started or resumed."""

    def __init__(self, config: TensorBoardConfig, run: Path, *, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(config.log_dir) if config.log_dir else run / "tensorboard"
        try:
            # Steps that a killed run had logged beyond its last checkpoint are made again: the old ones are hidden.
            self._writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None, flush_secs=30)
        except OSError as error:
            raise UsageError(f"tensorboard.log_dir: cannot write to {folder}: {error.strerror or error}") from error

    def log(self, step: int, values: dict[str, float]) -> None:
        """One scalar a value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - TensorBoard knows no failed runs
        """Write out what is buffered."""
        self._writer.close()
