"""The loop around the step: when to validate, to save, to print and to stop."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ac_recipes.errors import RunInterruptedError, UsageError
from ac_recipes.invocation import Invocation
from ac_recipes.recipe import Recipe
from ac_recipes.training.console import RunConsole
from ac_recipes.training.faults import Faults
from ac_recipes.training.manifest import Checkpoint
from ac_recipes.training.metrics import MetricsLog
from ac_recipes.training.numbers import json_number
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.rescue import Rescue
from ac_recipes.training.saving import Saver
from ac_recipes.training.signals import StopRequest

if TYPE_CHECKING:
    from ac_recipes.training.trainer import Trainer


@dataclass(frozen=True)
class Result:
    """Where a run left its files, and the losses it ended with (nats a token).

    `is_first`: whether this is rank 0, the one that speaks for all. `stopped_by`: the signal that ended the run early.
    """

    run: Path
    steps: int
    loss: float | None
    validation_loss: float | None
    is_first: bool
    stopped_by: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "run": str(self.run),
            "steps": self.steps,
            "loss": json_number(self.loss),
            "validation_loss": json_number(self.validation_loss),
            "stopped_by": self.stopped_by,
        }


@dataclass(kw_only=True)
class Loop:
    """Takes a trainer from where it is to the last step.

    resumed: the checkpoint that it was loaded from.

    Raises:
        UsageError: checkpoints are to be kept by a validation loss that there is none of.
    """

    recipe: Recipe
    folder: Path
    invocation: Invocation
    ranks: Ranks
    console: RunConsole
    trainer: "Trainer"
    saver: Saver
    log: MetricsLog
    faults: Faults
    rescue: Rescue
    resumed: Checkpoint | None = None
    last_loss: float | None = None
    validated: tuple[int, float] | None = None
    """How many steps were done when the validation loss was last measured, and the loss."""

    def __post_init__(self) -> None:
        self.schedule = self.trainer.schedule
        if self.recipe.checkpoint.keep_best and not len(self.trainer.data.validation):
            raise UsageError(
                "checkpoint.keep_best: needs a validation loss, but no data is held out; set "
                "dataset.validation_fraction, or leave keep_best out"
            )

    def run(self) -> Result:
        """Train to the last step, or to the end of the step in which a signal asks to stop.

        Raises:
            RunInterruptedError: a signal ended the run, and the recipe says to write no checkpoints.
        """
        stop = StopRequest()
        progress = self.console.progress(self.done, self.schedule.max_steps)
        with stop.listening(), progress, self.rescue.watching(), self.log.complete():
            if self.resumed is None:
                self.validate()
            else:
                self.judge(self.resumed)
            while self.done < self.schedule.max_steps:
                self.step()
                if signum := self.asked_to_end(stop):
                    return self.stop(signum)
                took_time = [self.validate_if_due(), self.save_if_due()]
                if any(took_time) and (signum := self.asked_to_end(stop)):  # who asks may not wait for another step
                    return self.stop(signum)
        self.saver.tell_best()
        self.console.line(f"done: {self.done} steps | run folder {self.folder}")
        return self.result()

    @property
    def done(self) -> int:
        """Optimizer steps done."""
        return self.trainer.steps_done

    def asked_to_end(self, stop: StopRequest) -> signal.Signals | None:
        """The signal that a rank was sent, unless the run is at its end."""
        signum = stop.agreed(self.ranks)
        return signum if self.done < self.schedule.max_steps else None

    def is_due(self, every: int | None) -> bool:
        """Whether something done every so many steps is due now; at the last step it always is."""
        return self.done == self.schedule.max_steps or (every is not None and self.done % every == 0)

    def step(self) -> None:
        """One optimizer step, and its figures."""
        self.faults.when = f"in step {self.done + 1}"
        figures = self.trainer.step()
        self.last_loss = figures.loss
        self.log.step(figures, is_due=self.done == 1 or self.is_due(self.schedule.log_every_steps))

    def validate_if_due(self) -> bool:
        """Whether a validation was due, and is made."""
        if due := self.is_due(self.schedule.val_every_steps):
            self.validate()
        return due

    def save_if_due(self) -> bool:
        """Whether a checkpoint was due, and is written."""
        if due := self.recipe.checkpoint.enabled and self.is_due(self.schedule.ckpt_every_steps):
            self.save()
        return due

    def validate(self) -> None:
        """Measure the validation loss, where data is held out."""
        self.faults.when = f"in the validation after step {self.done}"
        if (loss := self.trainer.validate()) is not None:
            self.validated = (self.done, loss)
            self.log.validation(self.done, loss)

    def judge(self, resumed: Checkpoint) -> None:
        """Make the validation that was due at the step gone on from, where the run was stopped, or failed, before it.
        The checkpoint learns of it, so that `keep_best` never deletes one that has no loss."""
        known = resumed.validation_loss
        if known is None:  # measured before a save that did not know of it, as a rescue's
            known = self.ranks.from_first(self.log.validation_loss(self.done))
        if known is not None:
            self.validated = (self.done, known)
        elif self.recipe.checkpoint.keep_best or self.is_due(self.schedule.val_every_steps):
            self.validate()
        if resumed.validation_loss is None and self.validation_loss is not None:
            self.saver.judge(resumed, self.validation_loss)

    def save(self) -> None:
        """Write a checkpoint; with `keep_best`, it has a validation loss to be judged by."""
        if self.recipe.checkpoint.keep_best and self.validation_loss is None:
            self.validate()
        self.log.write()
        path = self.saver.save(self.done, self.validation_loss)
        self.console.line(f"step {self.done}/{self.schedule.max_steps} | checkpoint {path}")

    def stop(self, signum: signal.Signals) -> Result:
        """End early: save, and say how to go on."""
        if not self.recipe.checkpoint.enabled:
            raise RunInterruptedError(signum, "nothing is saved, as checkpoint.enabled is false")
        if self.saver.newest < self.done:
            self.log.write()
            self.saver.save(self.done, self.validation_loss)
        self.console.line(
            f"stopped by {signum.name} after step {self.done}; go on with: {self.invocation.resume(self.folder)}"
        )
        return self.result(stopped_by=signum.name)

    @property
    def validation_loss(self) -> float | None:
        """The validation loss of the model as it is now, if it was measured."""
        return self.validated[1] if self.validated is not None and self.validated[0] == self.done else None

    def result(self, stopped_by: str | None = None) -> Result:
        """What the run came to."""
        validation_loss = None if self.validated is None else self.validated[1]
        return Result(self.folder, self.done, self.last_loss, validation_loss, self.ranks.is_first, stopped_by)
