"""The figures of a run: a line of `metrics.jsonl`, the console, the trackers. Rank 0 writes; all ranks call."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ac_recipes.errors import RunError
from ac_recipes.trackers import Tracker
from ac_recipes.training.console import GIB, RunConsole
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder, json_line


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
    """Where the figures of a run of `max_steps` steps go.

    unwritten: lines of `metrics.jsonl` that could not be written, as on a full disk; they are, before the next.
    """

    run_folder: RunFolder
    ranks: Ranks
    console: RunConsole
    trackers: Sequence[Tracker]
    max_steps: int
    unwritten: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Around a run: no line is left unwritten. Those that cannot be written when it ends are printed.

        Raises:
            OSError, RunError: there are such lines, of a run that has not failed otherwise.
        """
        try:
            yield
            self.write()
        except BaseException:
            with suppress(OSError, RunError):
                self.write()
            for line in self.unwritten:
                self.console.line(f"not in {self.run_folder.metrics}: {json_line(line)}")
            raise

    def write(self) -> None:
        """Write the lines that could not be written. A run that goes on from a checkpoint does not make them again, so
        this is done before one is saved.

        Raises:
            OSError, RunError: they still cannot.
        """
        if self.unwritten:
            self.run_folder.write_metrics(*self.unwritten)
            self.unwritten.clear()

    def _keep(self, line: dict[str, Any]) -> None:
        is_first = not self.unwritten
        self.unwritten.append(line)
        try:
            self.write()
        except OSError as error:
            if is_first:
                self.console.line(
                    f"{self.run_folder.metrics}: {error.strerror or error}; the figures from step {line['step']} on "
                    "are kept, and written when they can be, at the latest before the next checkpoint"
                )

    def step(self, figures: StepFigures, *, is_due: bool) -> None:
        """Keep the figures of a step. `is_due`: print its line as well."""
        if not self.ranks.is_first:
            return
        self._keep(asdict(figures))
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

    def validation_loss(self, step: int) -> float | None:
        """The one that was kept for `step`, by this run or the one it goes on with."""
        kept = [line.get("validation_loss") for line in self.run_folder.read_metrics() if line["step"] == step]
        return next((float(loss) for loss in reversed(kept) if loss is not None), None)

    def validation(self, step: int, loss: float) -> None:
        """Keep the validation loss after `step` steps, in nats a label token."""
        if not self.ranks.is_first:
            return
        self._keep({"step": step, "validation_loss": loss})
        for tracker in self.trackers:
            tracker.log(step, {"validation_loss": loss})
        self.console.line(f"step {step}/{self.max_steps} | validation loss {loss:.4f}")
        if not math.isfinite(loss):
            self.console.line(
                f"warning: the validation loss after step {step} is {loss}, although that of the training is finite: "
                "the model overflows on held-out data. The training goes on; no checkpoint of this step is the best"
            )
