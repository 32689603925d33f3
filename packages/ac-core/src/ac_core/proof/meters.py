"""Two meters that watch every operation of a step: bytes of live storages, and FLOPs.

Both are dispatch modes. They count operations, not time, and see real, meta and fake tensors alike. Tensor subclasses
that wrap others, such as DTensor, are counted by the local tensors inside.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from math import prod
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # nothing public tells a fake tensor from a real one
from torch.utils import checkpoint, flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from ac_core.region.offload import is_host_copy

aten = torch.ops.aten


class _Meter(TorchDispatchMode):
    """A dispatch mode that sees each kernel once."""

    supports_higher_order_operators = True  # FlexAttention is one
    needs_every_operation = True  # what ac_moe hides from modes that might change it is hidden from no meter

    def __init__(self) -> None:
        super().__init__()
        self._counts_fake: bool | None = None

    def __enter__(self) -> Any:
        # DTensor tries an operation on fake tensors to learn its output's shape. Such trials are no work of the step,
        # unless the whole step is one on fake tensors.
        if self._counts_fake is None:
            self._counts_fake = isinstance(torch.empty(0), FakeTensor)
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper takes its turn first, and comes back with its local tensors
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _is_trial(self, *values: Any) -> bool:
        return not self._counts_fake and any(isinstance(tensor, FakeTensor) for tensor in _tensors(values))


@dataclass
class _Storage:
    """serial: its number in order of appearance. foreign: bytes that it had before this meter could see it. size: bytes
    now. alive: the storage, or `None` once it is freed. host: it is a copy that offloading has made in host memory."""

    serial: int
    foreign: int
    size: int
    alive: "weakref.ref[torch.UntypedStorage]"
    host: bool

    @property
    def bytes(self) -> int:
        return self.size - self.foreign


class LiveBytes(_Meter):
    """Bytes of the storages created while it is active, each counted once however many tensors share it.

    A storage counts from the operation that creates it until it is freed, also where that is after the meter was left.
    What an existing storage gains or loses by a resize counts as well: so does FSDP2 allocate and free its gathered
    parameters. Scratch memory inside a kernel and copies of a generator's state are not seen.

    What offloading copies to the host counts by itself, on the CPU too.

    To count a run on fake tensors, enter it inside their mode. On an accelerator the numbers are of tensors, without
    the allocator's rounding.

    current: bytes alive now; below zero when more was freed by resizes than created.
    peak: the most there were at once.
    host, host_peak: the same of what offloading has copied to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.host = 0
        self.host_peak = 0
        self._serials = count()
        self._storages: dict[int, _Storage] = {}  # by id, which is stable: a storage has one Python object while alive

    def alive(self) -> dict[int, int]:
        """`{number of a storage: its bytes}` for the storages that count now. A number is never given twice."""
        here = (storage for storage in self._storages.values() if not storage.host)
        return {storage.serial: storage.bytes for storage in here if storage.bytes}

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers, as in `alive`, of the storages of `tensors`, as far as this meter has seen them."""
        seen = (self._storages.get(id(storage)) for tensor in tensors for storage in _storages(tensor))
        return {storage.serial for storage in seen if storage is not None}

    def __enter__(self) -> "LiveBytes":
        self._restore_resize = _on_resize(self._resized)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._restore_resize()

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # `torch.tensor` and the like make their tensor outside of any operation and hand it to this one.
        if func is not aten.lift_fresh.default:
            for storage in chain.from_iterable(map(_storages, _tensors((args, kwargs)))):
                if id(storage) not in self._storages:
                    self._track(storage, foreign=storage.nbytes())
        output = func(*args, **kwargs)
        if not self._is_trial(args, output):
            for storage in chain.from_iterable(map(_storages, _tensors(output))):
                self._see(storage)
        return output

    def _see(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(id(storage)) or self._track(storage, foreign=0)
        size = storage.nbytes()
        self._count(known, size - known.size)
        known.size = size

    def _track(self, storage: torch.UntypedStorage, foreign: int) -> _Storage:
        alive = weakref.ref(storage, partial(self._freed, id(storage)))
        host = is_host_copy()
        tracked = self._storages[id(storage)] = _Storage(next(self._serials), foreign, foreign, alive, host)
        return tracked

    def _freed(self, key: int, alive: "weakref.ref[torch.UntypedStorage]") -> None:
        storage = self._storages.get(key)
        if storage is not None and storage.alive is alive:
            del self._storages[key]
            self._count(storage, -storage.bytes)

    def _resized(self, storage: torch.UntypedStorage, before: int) -> None:
        if id(storage) not in self._storages:
            self._track(storage, foreign=before)
        self._see(storage)

    def _count(self, storage: _Storage, change: int) -> None:
        if storage.host:
            self.host += change
            self.host_peak = max(self.host_peak, self.host)
        else:
            self.current += change
            self.peak = max(self.peak, self.current)


def _on_resize(callback: Callable[[torch.UntypedStorage, int], None]) -> Callable[[], None]:
    """Have `callback(storage, bytes before)` called after every `storage.resize_()`; returns what ends that.

    A resize is no operation, so a dispatch mode does not see it. The method of the class is replaced for as long as the
    meter is active, as torch's own memory tracker does.
    """
    cls: Any = torch.UntypedStorage
    inherited = "resize_" not in vars(cls)
    original = cls.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        callback(storage, before)
        return result

    def restore() -> None:
        if inherited:
            del cls.resize_
        else:
            cls.resize_ = original

    cls.resize_ = resize_
    return restore


class Flops(_Meter):
    """FLOPs of matrix multiplications, convolutions and attention, by what they were executed for.

    They are counted as `torch.utils.flop_counter` does, formulas registered there included: a multiply and an add are
    two, and causal attention counts in full.

    forward, backward, recompute: FLOPs of the forward, of the backward, and of what a checkpoint ran again. Set
    `in_backward` before the backward begins, which must not be run with `create_graph=True`.

    An operation of the backward belongs to a recompute when grad mode is on: autograd runs its own nodes with grad mode
    off, and every checkpoint has to turn it on, to build the graph again. What a block itself runs without gradients,
    and a recompute for a gradient that the forward takes, are told by torch's checkpoint being on the Python stack.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0
        self.recompute = 0
        self.in_backward = False
        self._formulas = FORMULAS

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is None and _may_have_parts(func):
            # Below autograd (inference mode, inside a wrapper) an operation may come in one piece: see its parts.
            with self:
                output = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if output is NotImplemented else output
        output = func(*args, **kwargs)
        if formula is not None and not self._is_trial(args, output):
            flops = formula(*args, **kwargs, out_val=output)
            if (self.in_backward and torch.is_grad_enabled()) or _in_torch_recompute():
                self.recompute += flops
            elif self.in_backward:
                self.backward += flops
            else:
                self.forward += flops
        return output


_UNPACK = "unpack_hook"
"""What torch calls the function inside its checkpoint that recomputes when a saved tensor is asked for."""


def _may_have_parts(func: Any) -> bool:
    # A question about a tensor (`prim.device`, which a fake tensor sends here) would ask itself again without end.
    return isinstance(func, torch._ops.OpOverload) and any("Tensor" in str(r.type) for r in func._schema.returns)


def _in_torch_recompute() -> bool:
    """Whether `torch.utils.checkpoint` is running a region again, as far as Python's stack shows."""
    frame = sys._getframe(1)
    inner_backward = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename == checkpoint.__file__:
            if code.co_name == _UNPACK:
                return True
            if code is checkpoint.CheckpointFunction.backward.__code__:
                return not inner_backward
        inner_backward |= code is torch.autograd.backward.__code__
        frame = frame.f_back
    return False


def _shapes(formula: Callable[..., int]) -> Callable[..., int]:
    def of_tensors(*args: Any, **_: Any) -> int:
        return formula(*(arg.shape if isinstance(arg, Tensor) else arg for arg in args))

    return of_tensors


def _grouped_mm(a: torch.Size, b: torch.Size, *_: Any) -> int:
    """A grouped matrix is 3-d, or 2-d with the groups along one dimension, whose sizes then add up to it."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * prod(a[-2:]) * b[-1]


FORMULAS = {
    # What torch's registry has no formula for comes first; where it has one, that counts.
    aten._grouped_mm: _shapes(_grouped_mm),
    aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    **flop_counter.flop_registry,
}
"""FLOPs of an op by its packet: `formula(*args, out_val=result, **kwargs)`."""


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages that hold a tensor. One whose layout has none that Python can see (mkldnn) has no bytes here."""
    return [part.untyped_storage() for part in _parts(tensor) if part.layout is torch.strided]


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that make up one: itself, a wrapper's local tensors, the indices and values of a sparse one."""
    if hasattr(tensor, "__tensor_flatten__"):
        inside = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [part for value in inside if isinstance(value, Tensor) for part in _parts(value)]  # not its device mesh
    return [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else [tensor]


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values: it is on the meta device, or of a `FakeTensorMode`."""
    return tensor.is_meta or any(isinstance(part, FakeTensor) for part in _parts(tensor))
