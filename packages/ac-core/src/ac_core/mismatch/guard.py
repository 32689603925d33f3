"""A recompute that saves other tensors than its forward did is an error that says which block, which call and why.

torch compares number, shape, dtype and device of what forward and recompute saved, and raises in the middle of the
autograd engine, where neither the block nor the call is known any more. `MismatchGuard` hears of that first. Until then
it does next to nothing: a snapshot of plain attributes a forward. Then the recompute is run again, watched.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointError

from ac_core.errors import ActivationCheckpointingError, RecomputeMismatchError
from ac_core.mismatch.diagnosis import Mismatch, diagnose
from ac_core.mismatch.evidence import Change, PlainState, Snapshot
from ac_core.mismatch.recording import Meta, Recording, nodes_holding
from ac_core.region.contexts import ContextFn

# NOTE [ torch's checkpoint frame ]
# torch keeps one private `_CheckpointFrame` for each forward of a region, and compares with
# `frame.check_recomputed_tensors_match(gid)` after `frame.recompute_fn(*args)`. There is no public way to hear of the
# outcome before the engine raises it, so both are replaced on the frame:
# 1. The frame is found from the pack hook that torch has pushed when it enters the forward context.
# 2. Nothing that the frame holds may hold the frame, or what it has saved would live until the garbage collector runs.
#    The region knows it by a weak reference; and what the recompute context holds, which torch's own `recompute_fn`
#    refers to, must not hold the region, which refers to `recompute_fn`.
# 3. Where torch has changed (`TORCH_FRAME` is None), torch's own error comes as it is. What a recompute raises still
#    carries the block's name: that needs nothing private. `tests/region/test_mismatch.py` fails when it has changed.


def _torch_frame_class() -> type | None:
    try:
        frame = torch_checkpoint._CheckpointFrame(None, True, None, None)
    except (AttributeError, TypeError):
        return None
    needed = ("recompute_fn", "weak_holders", "x_metadatas", "recomputed", "recomp_counter")
    has_all = all(hasattr(frame, name) for name in (*needed, "check_recomputed_tensors_match"))
    return type(frame) if has_all and hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks") else None


TORCH_FRAME = _torch_frame_class()
_STOP = "_StopRecomputationError"
"""What torch ends a recompute with when everything needed is there."""


def _frame_being_run() -> Any | None:
    if TORCH_FRAME is not None and (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)):
        for cell in getattr(hooks[0], "__closure__", None) or ():
            if type(cell.cell_contents) is TORCH_FRAME:
                return cell.cell_contents
    return None


def _switch(value: str | None) -> bool:
    if value not in (None, "", "0", "1"):
        raise ValueError(f"AC_CORE_CHECK_VALUES: {value!r} is not one of '0', '1'")
    return value == "1"


_CHECK_ALWAYS = _switch(os.environ.get("AC_CORE_CHECK_VALUES"))
_checking = ContextVar("ac_core_check_recompute", default=_CHECK_ALWAYS)


@contextmanager
def check_recompute() -> Iterator[None]:
    """Compare the values too: a recompute of other numbers is an error that names block, call and line.

    For forwards inside this context, wherever their backward is. Every saved tensor is read once more in the forward
    and in the recompute, and every call is recorded: for finding out, not for training. The environment variable
    `AC_CORE_CHECK_VALUES=1` does it for a whole program. Numbers have to agree bit for bit, so a kernel that is not
    deterministic is found as well.

    Raises:
        RecomputeMismatchError: in the backward.
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


class MismatchGuard:
    """A context function for one block, around another one: `() -> (forward, recompute)`."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block = block
        self.name = name
        self.plain = PlainState(block)

    def __call__(self, context_fn: ContextFn | None = None) -> tuple["_Region", "_Recompute"]:
        forward, recompute = (None, None) if context_fn is None else context_fn()
        entered = _Recompute(self, recompute)
        return _Region(self, forward, entered), entered


class _Recompute:
    """The recompute context. May be entered again, for a second backward over the same graph.

    then: the block as its forward found it, inside every other context. probe: what is to be entered there.
    """

    __slots__ = ("guard", "inner", "probe", "then")

    def __init__(self, guard: MismatchGuard, inner: AbstractContextManager[Any] | None) -> None:
        self.guard = guard
        self.inner = inner
        self.then: Snapshot | None = None
        self.probe: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self.inner is not None:
            self.inner.__enter__()
        if self.probe is not None:
            self.probe.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.probe is not None:
                self.probe.__exit__(None, None, None)
            elif error is not None and kind.__name__ != _STOP and not isinstance(error, ActivationCheckpointingError):
                changes = self.guard.plain.changes(self.then) if self.then is not None else []
                error.add_note(_note(self.guard.name, error, changes))
        finally:
            if self.inner is not None:
                self.inner.__exit__(kind, error, traceback)


def _note(block: str, error: BaseException, changes: list[Change]) -> str:
    note = f"ac-core: raised while block '{block}' was recomputed in the backward"
    if isinstance(error, AssertionError) and "early_stop" in str(error):
        return (
            f"{note}: the block catches the exception by which torch ends a recompute; let it catch fewer kinds, or "
            "turn 'early_stop' off in the settings of activation checkpointing"
        )
    seen = f". Since then, {'; '.join(map(str, changes[:4]))}" if changes else ""
    return f"{note}; its forward had raised nothing{seen}"


class _Region:
    """One forward of a block, as its context, and what stands in for two parts of torch's frame in its recomputes."""

    __slots__ = ("_again", "_arguments", "_entered", "_frame", "_hooks", "_inner", "_recompute", "_saved", "guard")

    def __init__(self, guard: MismatchGuard, inner: AbstractContextManager[Any] | None, entered: _Recompute) -> None:
        self.guard = guard
        self._inner = inner
        self._entered = entered
        self._arguments: tuple[Any, ...] = ()
        self._hooks: AbstractContextManager[Any] | None = None
        self._saved: Recording | None = None  # under `check_recompute`
        self._again: Recording | None = None

    def __enter__(self) -> None:
        frame = _frame_being_run()
        if frame is not None:
            self._frame = weakref.ref(frame)
            self._recompute = frame.recompute_fn
            frame.recompute_fn = self.recompute
            frame.check_recomputed_tensors_match = self.check
        if _checking.get():
            if frame is None:
                raise ActivationCheckpointingError(
                    f"the values of block '{self.guard.name}' cannot be checked: torch {torch.__version__} keeps what "
                    "a checkpoint saves where ac-core does not look; leave check_recompute and AC_CORE_CHECK_VALUES off"
                )
            self._saved = Recording(self.guard.block, fingerprints=True)
            self._hooks = _beside_torch(self._saved)
            self._hooks.__enter__()
        try:
            if self._inner is not None:
                self._inner.__enter__()
            self._entered.then = self.guard.plain.read()
        except BaseException:
            self._leave_hooks()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        inner, self._inner = self._inner, None
        try:
            if inner is not None:
                inner.__exit__(kind, error, traceback)
        finally:
            self._leave_hooks()

    def _leave_hooks(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def recompute(self, *arguments: Any) -> None:
        """In place of `frame.recompute_fn`."""
        # `check` follows at once and may need the arguments. In a nested region they can be unpacked only once.
        self._arguments = arguments
        try:
            if self._saved is None:
                self._recompute(*arguments)
            else:
                self._again = Recording(self.guard.block, fingerprints=True)
                with _beside_torch(self._again):
                    self._recompute(*arguments)
        except CheckpointError as error:
            frame = self._frame()
            more = [gid for gid, count in frame.recomp_counter.items() if count > len(frame.weak_holders)]
            if not more:
                raise
            raise self._explained(error, more[-1], arguments) from None

    def check(self, gid: Any) -> None:
        """In place of `frame.check_recomputed_tensors_match`."""
        arguments, self._arguments = self._arguments, ()
        frame = self._frame()
        try:
            TORCH_FRAME.check_recomputed_tensors_match(frame, gid)  # type: ignore[union-attr]
        except CheckpointError as error:
            raise self._explained(error, gid, arguments) from None
        if self._saved is not None and self._again is not None:
            pairs = zip(self._saved.saved, self._again.saved, strict=False)
            if any(was.fingerprint != now.fingerprint for was, now in pairs):
                raise self._explained(None, gid, arguments)

    def _explained(self, error: CheckpointError | None, gid: Any, arguments: tuple[Any, ...]) -> RecomputeMismatchError:
        frame = self._frame()
        try:
            mismatch = Mismatch(
                block=self.guard.block,
                name=self.guard.name,
                forward=[Meta(**meta) for meta in frame.x_metadatas],
                recomputed=_recomputed(frame, gid),
                count=frame.recomp_counter[gid],
                forward_saved=self._saved and self._saved.saved,
                recompute_saved=self._again and self._again.saved,
                values_only=error is None,
                arguments=arguments,
                plain=self.guard.plain,
                then=self._entered.then,
                forward_nodes=_forward_nodes(frame),
                again=lambda probe: self._run_again(probe, arguments),
            )
            return diagnose(mismatch)
        except Exception as trouble:  # noqa: BLE001 - what torch found must not get lost because of it
            return RecomputeMismatchError(
                f"block '{self.guard.name}': its recompute saved other tensors than its forward did. {error or ''}\n"
                f"(looking for the cause failed: {trouble!r})",
                block=self.guard.name,
            )

    def _run_again(self, probe: AbstractContextManager[Any], arguments: tuple[Any, ...]) -> None:
        self._entered.probe = probe
        try:
            self._recompute(*arguments)
        finally:
            self._entered.probe = None


def _beside_torch(recording: Recording) -> AbstractContextManager[None]:
    """Records beside the hooks that torch's checkpoint has just pushed."""
    return recording.hooks(*torch._C._autograd._top_saved_tensors_default_hooks(True))


def _recomputed(frame: Any, gid: Any) -> dict[int, Meta]:
    """What the recompute saved, position by position, where the graph still needs it."""
    found = {}
    for position, holder in enumerate(reference() for reference in frame.weak_holders):
        handle = holder and holder.handles.get(gid)
        if handle is not None:
            found[position] = Meta.of(frame.recomputed[gid][handle])
    return found


def _forward_nodes(frame: Any) -> dict[int, str]:
    """The autograd nodes that saved the forward's tensors, by position, of those that lie before the node whose
    backward is running now."""
    alive = {position: holder for position, ref in enumerate(frame.weak_holders) if (holder := ref()) is not None}
    names = nodes_holding([torch._C._current_autograd_node()], alive.values())
    return {position: names[id(holder)] for position, holder in alive.items() if id(holder) in names}
