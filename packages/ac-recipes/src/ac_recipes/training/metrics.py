"""The figures of a run: a line of `metrics.jsonl`, the console, the trackers. Rank 0 writes; all ranks call."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ac_recipes.trackers import Tracker
from ac_recipes.training.console import GIB, RunConsole
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One optimizer step over all ranks.

    loss: nats a label token. label_tokens: that counted. seconds: of rank 0. peak_bytes: of the rank that had most.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    label_tokens: int
    seconds: float
    peak_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.label_tokens / self.seconds


@dataclass(frozen=True)
class MetricsLog:
    """Where the figures of a run of `max_steps` steps go."""

    run_folder: RunFolder
    ranks: Ranks
    console: RunConsole
    trackers: Sequence[Tracker]
    max_steps: int

    def step(self, figures: StepFigures, *, is_due: bool) -> None:
        """Keep the figures of a step. `is_due`: print its line as well."""
        if not self.ranks.is_first:
            return
        self.run_folder.write_metrics(**asdict(figures))
        tracked = {
            "loss": figures.loss,
            "grad_norm": figures.grad_norm,
            "lr": figures.lr,
            "tokens_per_second": figures.tokens_per_second,
            "mem_gib": figures.peak_bytes / GIB,
        }
        for tracker in self.trackers:
            tracker.log(figures.step, tracked)
        self.console.step(
            figures.step,
            self.max_steps,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            lr=figures.lr,
            peak_bytes=figures.peak_bytes,
            rate=figures.tokens_per_second,
            line=is_due,
        )

    def validation(self, step: int, loss: float) -> None:
        """Keep the validation loss after `step` steps, in nats a label token."""
        if not self.ranks.is_first:
            return
        self.run_folder.write_metrics(step=step, validation_loss=loss)
        for tracker in self.trackers:
            tracker.log(step, {"validation_loss": loss})
        self.console.line(f"step {step}/{self.max_steps} | validation loss {loss:.4f}")
