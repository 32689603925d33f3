"""A meter that writes down every allocation and release of a step, and what can be read off that afterwards."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import graph

from ac_core.proof import meters
from ac_core.proof.meters import Flops, LiveBytes, _Storage, _storages, _tensors

aten = torch.ops.aten


@dataclass(frozen=True)
class Moment:
    """A stretch of a step.

    phase: `"forward"`, `"backward"` or `"optimizer"`. block: the one that runs; `None` outside of blocks. start, stop:
    which entries of the log are its own. flops, recompute: FLOPs executed, of which for a recompute.
    """

    phase: str
    block: str | None
    start: int
    stop: int
    flops: int = 0
    recompute: int = 0


@dataclass(slots=True)
class Birth:
    """Where a storage comes from. moment: index among the moments, -1 before the step. op: that created it, or
    `"resize"`. again: in a recompute. communication: by FSDP2, for what it sends and receives. shape, dtype: of the
    tensor that it was made for; None if no operation made it."""

    moment: int
    op: str
    again: bool = False
    communication: bool = False
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Log:
    """One step, entry by entry.

    before: bytes of each storage that was alive when the step began, by number. storages, changes: which storage grew
    or shrank, and by how many bytes. births: of every storage.
    """

    before: dict[int, int]
    storages: list[int]
    changes: list[int]
    moments: list[Moment]
    births: dict[int, Birth]

    def totals(self) -> Iterator[int]:
        """Bytes alive after each entry; the first is before them all."""
        now = sum(self.before.values())
        yield now
        for change in self.changes:
            now += change
            yield now

    def peaks(self) -> list[tuple[int, int]]:
        """For each moment, the most bytes alive in it and the entry after which that is."""
        totals = list(self.totals())
        found = []
        for moment in self.moments:
            best = max(range(moment.start, moment.stop + 1), key=totals.__getitem__)
            found.append((totals[best], best))
        return found

    def alive(self, entry: int) -> dict[int, int]:
        """Bytes of each storage after the first `entry` entries of the log."""
        alive = dict(self.before)
        for number, change in zip(self.storages[:entry], self.changes[:entry], strict=True):
            alive[number] = alive.get(number, 0) + change
        return {number: size for number, size in alive.items() if size}


@dataclass
class _Open:
    phase: str
    block: str | None
    start: int
    flops: int
    recompute: int


class Ledger(LiveBytes):
    """Counts like `LiveBytes`, and keeps the log. Nothing is logged before `start`.

    flops: the meter of FLOPs that runs beside it, read at the bounds of the moments. sharded: whether the model is
    sharded by FSDP2, whose buffers are then told from the rest. hosted: bytes that offloading has copied to the host,
    by the block that ran.
    """

    def __init__(self, flops: Flops) -> None:
        super().__init__()
        self.flops = flops
        self.sharded = False
        self.hosted: Counter[str | None] = Counter()
        self._op = ""
        self._recording = False
        self._before: dict[int, int] = {}
        self._log: list[tuple[int, int]] = []
        self._moments: list[Moment] = []
        self._births: dict[int, Birth] = {}
        self._open: _Open | None = None

    def start(self, phase: str) -> None:
        """Forget what was logged; from here on it is the step that counts."""
        self._before = self.alive()
        self._log, self._moments, self._open = [], [], None
        present = [storage.serial for storage in self._storages.values()]  # empty ones too: FSDP2 fills those again
        self._births = {number: replace(self._births[number], moment=-1, again=False) for number in present}
        self._recording = True
        self.begin(phase)

    def begin(self, phase: str, block: str | None = None) -> None:
        """Another moment begins, if it is another."""
        if not self._recording or self.now == (phase, block):
            return
        self._close()
        self._open = _Open(phase, block, len(self._log), self._all_flops(), self.flops.recompute)

    @property
    def now(self) -> tuple[str, str | None] | None:
        """The phase and the block of the moment that is on."""
        return None if self._open is None else (self._open.phase, self._open.block)

    @property
    def entries(self) -> int:
        """How many there are by now."""
        return len(self._log)

    def finish(self, without: set[int]) -> Log:
        """End the step. without: storages that were there before it and are to be left out."""
        self._close()
        self._recording = False
        storages, changes = [number for number, _ in self._log], [change for _, change in self._log]
        before = {number: size for number, size in self._before.items() if number not in without}
        return Log(before, storages, changes, self._moments, self._births)

    def _close(self) -> None:
        """What allocated and released nothing is no moment."""
        if self._open is not None and self._open.start < len(self._log):
            flops, recompute = self._all_flops() - self._open.flops, self.flops.recompute - self._open.recompute
            moment = Moment(self._open.phase, self._open.block, self._open.start, len(self._log), flops, recompute)
            self._moments.append(moment)
        self._open = None

    def _all_flops(self) -> int:
        return self.flops.forward + self.flops.backward + self.flops.recompute

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked tens of thousands of times, through every mode
        self._op = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if func in _OUT_OF_PLACE:
            func = _as_without_modes(func, args[0])
        output = super()._run(func, args, kwargs)
        self._op = "resize"  # what grows outside of operations does so by that
        for tensor in _tensors(output):
            for storage in _storages(tensor):
                birth = self._births[self._storages[id(storage)].serial]
                if birth.shape is None:
                    birth.shape, birth.dtype = tuple(tensor.shape), tensor.dtype
        return output

    def _track(self, storage: torch.UntypedStorage, foreign: int) -> _Storage:
        tracked = super()._track(storage, foreign)
        moment = len(self._moments) if self._recording else -1
        again = self._open is not None and self._open.phase == "backward" and torch.is_grad_enabled()
        self._births[tracked.serial] = Birth(moment, self._op, again, self.sharded and _is_fsdp_running())
        return tracked

    def _count(self, storage: _Storage, change: int) -> None:
        super()._count(storage, change)
        if not (self._recording and change):
            return
        if not storage.host:
            self._log.append((storage.serial, change))
        elif change > 0:
            self.hosted[None if self._open is None else self._open.block] += change


# NOTE [ Out of place for modes alone ]
#
# Where several gradients come to one tensor, autograd's engine adds the later ones to the first, in place if nobody
# else has that. Its nodes put the gradient of an index into zeros, in place. While a dispatch mode is on, or for fake
# tensors, both are done out of place (`isTensorSubclassLike`): one tensor more than in a real step, a tenth of the peak
# of Mamba. So here they are done in place after all.
#
# 1. It is the engine, or a node of C++, if Python called nothing below `backward`.
# 2. Nobody else has a tensor if its storage has no other, and none but the caller holds it. With what the dispatcher
#    and Python hold for this call, these are 2 references and the number below. A test fails if torch counts otherwise.
_OUT_OF_PLACE = {
    aten.add.Tensor: (aten.add_.Tensor, 4),
    aten.index_put.default: (aten.index_put_.default, 5),
    aten.scatter.src: (aten.scatter_.src, 5),
    aten.scatter.value: (aten.scatter_.value, 5),
    aten.scatter_add.default: (aten.scatter_add_.default, 5),
}


def _as_without_modes(func: Any, written: Any) -> Any:
    """The operation that autograd would run, were no mode on, for `func`, whose first argument is `written`."""
    in_place, held = _OUT_OF_PLACE[func]
    alone = (
        isinstance(written, FakeTensor)
        and not torch.is_grad_enabled()
        and written.is_contiguous()
        and torch._C._storage_Use_Count(written.untyped_storage()._cdata) == 2
        and written._use_count() <= held
    )
    return in_place if alone and _is_engine_running() else func


_ENGINE = graph._engine_run_backward.__code__


def _is_engine_running() -> bool:
    """Whether it was the engine that called the operation that is being dispatched."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_DISPATCHING):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


_DISPATCHING = (__file__, meters.__file__, "/torch/_compile.py", "/torch/_dynamo/eval_frame.py")
"""What stands between: dispatch modes, which are kept from being compiled."""
_DEVICE = torch.ops.prim.device.default
_FSDP = "/torch/distributed/fsdp/_fully_shard/"


def _is_fsdp_running() -> bool:
    """Whether what is being allocated is FSDP2's own, as far as Python's stack shows: its hooks return before the
    module's forward begins."""
    frame = sys._getframe(1)
    while frame is not None:
        if _FSDP in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
