"""What ends a run, in words: what happened, what is kept, what to do."""

import errno
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint import CheckpointException

from ac_core import ActivationCheckpointingError, RecomputeMismatchError
from ac_recipes.errors import LostPeerError, RankError, RunError, RunInterruptedError, UsageError
from ac_recipes.invocation import Invocation
from ac_recipes.recipe import Recipe
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.manifest import Checkpoint
from ac_recipes.training.memory import memory_limit
from ac_recipes.training.optimizer import warmup_steps
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder

_GIB = 2**30
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CUT_OFF_TEXT = "unexpected pos"  # torch's zip writer; the OSError that it hides gets lost between ranks
_TOO_LARGE_TEXT = "File too large"
_NO_SPACE_TEXT = ("No space left on device", "Disk quota exceeded", _TOO_LARGE_TEXT, _CUT_OFF_TEXT)
_NO_MEMORY_TEXT = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "CUDA out of memory")
_LOST_PEER_TEXT = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


class NotFiniteError(ArithmeticError):
    """The loss or the gradient norm of step `step` is NaN or infinite, on all ranks. Its update was not made."""

    def __init__(self, what: str, value: float, step: int) -> None:
        super().__init__(f"the {what} is {value} at step {step}")
        self.step = step


class Faults:
    """Turns what ends a run into a `RunError` that names the remedy. What a run has saved is never touched.

    when: what the run is doing, for its last words; whoever goes on to something else says so.
    run: its folder; None until there is one.
    unsaved: why what was trained since the newest checkpoint could not be saved, where that was tried.
    saved_alone: whether this rank has saved it, after others were lost.
    """

    def __init__(self, run: RunFolder | None, invocation: Invocation, ranks: Ranks, recipe: Recipe) -> None:
        self.when = "while the run was set up"
        self.unsaved: str | None = None
        self.saved_alone = False
        self.run = run
        self._invocation = invocation
        self._ranks = ranks
        self._recipe = recipe

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around the run.

        Raises:
            RunError: a loss that is not finite; Ctrl-C.
            RankError: out of memory, a disk that is full, a file that cannot be read; checkpointing that a step has
                shown not to be what was asked for; another rank is gone. Whatever else is raised is a mistake of the
                program and goes through with its traceback.
        """
        try:
            yield
        except KeyboardInterrupt as error:
            raise RunInterruptedError(signal.SIGINT, kept_in(self.run, self._invocation)) from error
        except Exception as error:
            is_known = isinstance(error, (RuntimeError, OSError, MemoryError, UsageError, NotFiniteError))
            # Libraries written in Rust raise nothing narrower than Exception when a disk is full.
            if not (is_known or is_disk_full(error)) or (known := self.explain(error)) is None:
                raise
            raise known from error

    def explain(self, error: BaseException) -> RunError | None:
        """`error` as the run's last words; None if it is not known, or has been explained already."""
        if isinstance(error, RunError) or (isinstance(error, UsageError) and not is_out_of_memory(error)):
            return None
        if isinstance(error, NotFiniteError):
            return RunError(self._not_finite(error))
        if is_out_of_memory(error):
            return RankError(self._out_of_memory(error))
        if is_lost_peer(error):
            return self.lost_peer()
        if is_disk_full(error) or isinstance(error, OSError):
            remedy = _remedy(error)
            return RankError(f"{reason_of(error)}, {self.when}; {self.kept()}. {remedy} {self.go_on()}")
        return self._not_as_asked(error)

    def lost_peer(self) -> LostPeerError:
        """Another rank is gone; with what the run goes on from, as that one may not be able to tell."""
        kept = f"{self.kept()}; {self.go_on()}"
        said = f"another rank has ended, {self.when}, and says why on its node; {kept}"
        return LostPeerError(said, kept, has_saved=self.saved_alone)

    def not_saved(self, error: BaseException, step: int) -> RunError:
        """The checkpoint of step `step` could not be written."""
        self.when = f"while the checkpoint of step {step} was written"
        if (known := self.explain(error)) is not None:
            return known
        assert self.run is not None
        return RunError(
            f"the checkpoint of step {step} cannot be written to {self.run.checkpoints}: {reason_of(error)}; "
            f"{self.kept()}. Once it is mended, {self.go_on()}"
        )

    def kept(self) -> str:
        """The newest checkpoint that a run can go on from."""
        newest = _newest(self.run)
        return newest if self.unsaved is None else f"{newest} (the steps since could not be saved: {self.unsaved})"

    def go_on(self, settings: Mapping[str, object] | None = None) -> str:
        """How to go on from there, with `settings` in place of the run's."""
        return _go_on(self.run, self._invocation, settings)

    def _not_finite(self, error: NotFiniteError) -> str:
        """The command goes on with a smaller learning rate: the same one would lead to the same step."""
        remedies, settings = _calmer(self._recipe, error.step)
        said = f"{error}; {self.kept()}. Try {remedies}; {self.go_on(settings)}"
        saved = _saved(self.run)
        if not saved:
            return said
        why = "is of the step just before and " if saved[-1].step == error.step - 1 else ""
        none = "start the run anew, as there is no earlier one"
        earlier = f"--resume takes {saved[-2].path}" if len(saved) > 1 else none
        return (
            f"{said} (the checkpoint {why}may be spoilt already, its weights grown too large: if the run fails again, "
            f"delete it, and {earlier})"
        )

    def _not_as_asked(self, error: BaseException) -> RunError | None:
        """What only a step can show of the recipe: a name of what is to be kept fits no call."""
        if not isinstance(error, ActivationCheckpointingError) or isinstance(error, RecomputeMismatchError):
            return None
        return RankError(f"distributed.activation_checkpointing: {error}; {self.when}; {self.kept()}")

    def _out_of_memory(self, error: BaseException) -> str:
        device = self._ranks.device
        limit = memory_limit(device)
        where = f"on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "for this process"
        return (
            f"out of memory {where} ({limit / _GIB:.1f} GiB), {self.when}: {reason_of(error)}; {self.kept()}. Find "
            f"what fits with: {self._invocation.plan(limit)}; then {self.go_on()}"
        )


def kept_in(run: RunFolder | None, invocation: Invocation) -> str:
    """What the run in that folder, if there is one yet, goes on from, and the command for it."""
    return f"{_newest(run)}; {_go_on(run, invocation)}"


def _newest(run: RunFolder | None) -> str:
    saved = _saved(run)
    return f"the newest checkpoint is {saved[-1].path}" if saved else "no checkpoint was written yet"


def _go_on(run: RunFolder | None, invocation: Invocation, settings: Mapping[str, object] | None = None) -> str:
    if run is None or not _saved(run) or not run.recipe.exists():
        return "start the run anew"
    return f"go on with: {invocation.resume(run.path, settings)}"


def _saved(run: RunFolder | None) -> list[Checkpoint]:
    return [] if run is None else whole_checkpoints(run.checkpoints)


def _calmer(recipe: Recipe, step: int) -> tuple[str, dict[str, float]]:
    """What keeps updates smaller than they were up to `step`, in words, and the settings of the first of these."""
    lr, norm, rates = recipe.optimizer.lr, recipe.clip_grad_norm.max_norm, recipe.lr_scheduler
    settings = {"optimizer.lr": float(f"{lr / 10:.3g}")}
    if rates.min_lr > settings["optimizer.lr"]:
        settings["lr_scheduler.min_lr"] = settings["optimizer.lr"]
    remedies = [f"a smaller optimizer.lr than {lr:g}"]
    if step <= warmup_steps(recipe.step_scheduler.max_steps, rates):
        remedies.append("a longer lr_scheduler.lr_warmup_steps")
    remedies.append(
        "gradients clipped, which are not (clip_grad_norm.max_norm 1.0)"
        if norm is None
        else f"a smaller clip_grad_norm.max_norm than {norm:g}"
    )
    return f"{', '.join(remedies[:-1])} or {remedies[-1]}", settings


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is an allocation that failed, on the CPU or on a GPU."""
    for each in causes(error):
        if isinstance(each, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(each, RuntimeError) and any(text in str(each) for text in _NO_MEMORY_TEXT):
            return True
    return False


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is a collective that failed because another rank has ended."""
    return any(text in str(each) for each in causes(error) for text in _LOST_PEER_TEXT)


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is a write for which there was no room."""
    return any(
        (isinstance(each, OSError) and each.errno in _NO_SPACE) or any(text in str(each) for text in _NO_SPACE_TEXT)
        for each in causes(error)
    )


def _remedy(error: BaseException) -> str:
    """What to do about a file that cannot be read or written."""
    if any(getattr(each, "errno", None) == errno.EFBIG or _TOO_LARGE_TEXT in str(each) for each in causes(error)):
        return "Raise the limit on the size of a file (`ulimit -f`, or the file system's own), and"
    return "Make room, and" if is_disk_full(error) else "Once it is mended,"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what it came from: causes, what it was raised in the handling of, what it collects from ranks."""
    while error is not None:
        yield error
        if isinstance(error, CheckpointException):
            for failure, _stack in error.failures.values():
                yield from causes(failure)
        error = error.__cause__ or error.__context__


def reason_of(error: BaseException) -> str:
    """What went wrong in one line: in the system's words, with the file, if a system call is what failed."""
    if isinstance(error, RunError):
        return str(error).partition(". ")[0]
    chain = list(causes(error))
    if failed := next((each for each in chain if isinstance(each, OSError) and each.strerror), None):
        return f"{failed.filename}: {failed.strerror}" if failed.filename else str(failed.strerror)
    if any(_CUT_OFF_TEXT in str(each) for each in chain):
        return "a file could be written only in part, as on a full disk"
    told = next(each for each in chain if not isinstance(each, CheckpointException))
    lines = [line.strip() for line in str(told).splitlines() if line.strip()] or [type(told).__name__]
    return re.sub(r"^\[enforce fail at [^\]]*\][^.]*\. ", "", lines[0]).partition(". ")[0][:300]
