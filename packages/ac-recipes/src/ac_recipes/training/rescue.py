"""Keeping what was trained when a step fails.

NOTE [ The last whole step ]
1. Until its update begins, a step changes gradients and buffers, and nothing else that a run goes on from. `LastStep`
   holds references to weights and optimizer state, and copies of the buffers from before the step. What it holds is
   therefore the run after its last whole step, at any moment but during an update.
2. A loss that is not finite is found by all ranks at once. Whatever else fails may fail on one rank, while the others
   wait for it in a collective. That rank rings (`alarm`); on the others a thread hears it and writes their part, by the
   references alone: it touches no module, in whatever state the main thread has left it. They communicate in a group
   of their own. When the rank that failed then ends, the others lose their peer and end as well. A main thread that
   has all it needs for its update waits with it: no update begins while the weights are being written.
3. A rank that is killed tells nobody. The next collective fails on a rank that waits for it, which tells the others:
   they may wait for that one. No group can be relied on then, not even a barrier with a time limit. Where each rank
   holds the whole run (DDP; FSDP2 whose copies are not sharded), one that is left writes it by itself: the first to
   claim it.
4. A step that fails within its update leaves weights of which some are new and some are old: they are not saved. Nor
   are weights that are not finite. A model's buffers are those of rank 0, as in DDP, so no other saves them alone.
5. Nothing is deleted for a rescue, whatever `checkpoint.keep_last` says: older checkpoints may be what is of use.
"""

import gc
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ac_recipes.errors import LostPeerError, RunError
from ac_recipes.rank_process import end_rank
from ac_recipes.training.alarm import Alarm
from ac_recipes.training.checkpoint import RunState
from ac_recipes.training.faults import Faults, NotFiniteError, causes, is_lost_peer, reason_of
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.saving import Saver

if TYPE_CHECKING:
    from ac_recipes.training.trainer import Trainer

MEETING = timedelta(seconds=60)
"""How long ranks wait for one another when one has failed."""

PATIENCE = timedelta(minutes=10)
"""How long the thread that ends a rank waits for the other, which saves."""


class LastStep:
    """The run after its last whole step: see the note above. `is_wanted`: whether a run may be saved at all."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, is_wanted: bool = True) -> None:
        self.is_updating = False
        self._is_wanted = is_wanted
        self._model, self._optimizer = model, optimizer
        self._named = model.module if isinstance(model, DistributedDataParallel) else model
        self._references: RunState | None = None
        self._states = 0
        self._update = threading.Lock()
        self._buffers: dict[str, Tensor] = {}

    def begin(self) -> None:
        """A step begins."""
        if self._is_wanted:
            self._buffers = {name: buffer.clone() for name, buffer in self._named.named_buffers()}

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the update of the step, with which it is done. One that fails stays begun."""
        with self._update:
            self.is_updating = True
            yield
            # A parameter has optimizer state from its first gradient on, which may come in any step.
            if self._is_wanted and len(self._optimizer.state) != self._states:
                self._references = RunState.of(self._model, self._optimizer)
                self._states = len(self._optimizer.state)
            self._buffers = {}
            self.is_updating = False

    @contextmanager
    def still(self) -> Iterator[None]:
        """No update begins inside of the context.

        Raises:
            RuntimeError: one has begun and does not end.
        """
        if not self._update.acquire(timeout=MEETING.total_seconds()):
            raise RuntimeError("the update of a step has begun and does not end")
        try:
            yield
        finally:
            self._update.release()

    @property
    def state(self) -> RunState:
        """What to save. There is none before the first update."""
        assert self._references is not None
        model = self._references.model
        return replace(
            self._references, model=model | {name: values for name, values in self._buffers.items() if name in model}
        )

    @property
    def has_buffers(self) -> bool:
        """Whether a checkpoint holds any."""
        assert self._references is not None
        return any(name in self._references.model for name, _ in self._named.named_buffers())


class Rescue:
    """Saves the last whole step of `trainer` when the run fails, on all `ranks` of it. Every rank makes one."""

    def __init__(self, ranks: Ranks, saver: Saver, faults: Faults, trainer: "Trainer") -> None:
        self._ranks, self._saver, self._faults, self._trainer = ranks, saver, faults, trainer
        self._once = threading.Lock()
        self._is_over = threading.Event()
        self._alarm: Alarm | None = None
        if ranks.world_size > 1 and saver.config.enabled:
            self._ranks = replace(ranks, group=dist.new_group(backend="gloo"))
            self._alarm = Alarm(ranks, failed=self._keep_with_others, lost=self._keep_alone)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the steps of a run. What is raised goes on, after the rescue; why there is none, `faults` is told."""
        try:
            yield
        except (RuntimeError, OSError, MemoryError, NotFiniteError) as error:
            lost = isinstance(error, LostPeerError) or is_lost_peer(error)
            is_known = lost or self._faults.explain(error) is not None
            if is_known and self._trainer.steps_done > self._saver.newest:
                release(error)
                self._trainer.optimizer.zero_grad(set_to_none=True)
                if self._alarm is not None and not isinstance(error, NotFiniteError):
                    self._alarm.ring(lost=lost)
                self._keep(alone=lost)
            if isinstance(error, LostPeerError):  # in a save, which said so before anything was rescued
                raise self._faults.lost_peer() from error
            raise
        if self._alarm is not None:
            self._alarm.switch_off()

    def _keep_with_others(self) -> None:
        """On a rank that has heard the alarm. If its part fails, the others wait for it in the save, and its own main
        thread for them: all end once they lose it."""
        if not self._keep():
            end_rank(RunError.exit_code)

    def _keep_alone(self) -> None:
        self._keep(alone=True)

    def _keep(self, *, alone: bool = False) -> bool:
        """Save, once, or tell `faults` why that is not possible: from the main thread, or from that of the alarm.

        Returns:
            Whether this thread has not failed in it. That there is a reason not to save, on which all ranks agree, is
            no failure.
        """
        if not self._once.acquire(blocking=False):
            self._is_over.wait(PATIENCE.total_seconds())
            return True
        try:
            self._faults.unsaved = self._reason_not_to() or (self._saved_alone() if alone else self._saved())
        except (RuntimeError, OSError, MemoryError, CheckpointException) as error:
            self._faults.unsaved = reason_of(error)
            return False
        finally:
            self._is_over.set()
        return True

    def _reason_not_to(self) -> str | None:
        return None if self._saver.config.enabled else "checkpoint.enabled is false"

    def _saved(self) -> str | None:
        if self._ranks.world_size > 1:
            try:
                dist.monitored_barrier(self._ranks.group, timeout=MEETING, wait_all_ranks=True)
            except RuntimeError:  # of whichever kind: one did not come
                return self._saved_alone()
        try:
            with self._trainer.last.still():
                return self._saved_together()
        except (RuntimeError, CheckpointException) as error:
            if not is_lost_peer(error):
                raise
            return self._saved_alone()

    def _saved_alone(self) -> str | None:
        """Without a word to another rank."""
        trainer = self._trainer
        if not trainer.last.state.is_whole:
            return "each rank held a share of the run, and one of them is gone or does not answer"
        with trainer.last.still():
            wrong = self._wrong_here()
            if wrong is None and not self._ranks.is_first and trainer.last.has_buffers:
                wrong = "the buffers that count are those of rank 0, which is gone"
            if wrong is None:
                with _aside(self._ranks.device):
                    self._saver.rescue_alone(trainer.steps_done, trainer.last.state)
                self._faults.saved_alone = True
            return wrong

    def _wrong_here(self) -> str | None:
        step, last = self._trainer.steps_done, self._trainer.last
        if last.is_updating:
            return f"some of the weights have the update of step {step + 1} already, and others have not"
        return _spoilt(last.state)

    def _saved_together(self) -> str | None:
        step, last = self._trainer.steps_done, self._trainer.last
        found = self._ranks.gather((step, self._wrong_here()))
        if any(other != step for other, _ in found):
            return "the ranks had not done the same number of steps"
        wrong = next((told for _, told in found if told is not None), None)
        if wrong is None:
            with _aside(self._ranks.device):
                self._saver.rescue(step, last.state, self._ranks)
        return wrong


def release(error: BaseException) -> None:
    """Free the tensors of the calls that `error` ended: its traceback keeps their local variables alive."""
    for each in causes(error):
        traceback.clear_frames(each.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _spoilt(state: RunState) -> str | None:
    for name, value in state.model.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if not local.isfinite().all():
            return f"{name} is not finite since the step before"
    return None


def _aside(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of its own: that of the step may wait for a collective that never ends."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
