"""Boundary tensors in host memory: what a checkpointed block keeps leaves the device until the block is run again.

NOTE [ Boundary tensors on the host ]
1. torch's checkpoint saves the inputs of a region as autograd saves any tensor: through the saved-tensor hooks that are
   active where it is called. Those of this module are active there. What the block itself saves never comes here: the
   region has hooks of its own.
2. Tensors that need a gradient are moved, which are the hidden states. Masks and rotary tables, which all blocks are
   given, are alive anyway.
3. On CUDA host memory is pinned and copies run on a stream of their own: out while the block runs forward, and back
   while the block behind it runs backward. The latter has two boundary tensors on the device at once, and so it is on
   every device, so that what is measured on one holds on the other.
4. The stream of the forward waits for the copies at the end of the block. Whatever comes behind may free or change a
   boundary tensor; the block itself must not change it.
5. Every recompute gets a copy of its own. What is on the host stays as it is, for a second backward.

`torch.autograd.graph.save_on_cpu` would hold up the forward for as long as the copy takes, copies nothing on the CPU
and would move what all blocks share, once for each.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ac_core.errors import ActivationCheckpointingError

_to_host = ContextVar("ac_core_to_host", default=False)


def is_host_copy() -> bool:
    """Whether what is being allocated takes host memory, on whatever device: for meters."""
    return _to_host.get()


class HostMemory:
    """Where the blocks of one model put their boundary tensors. Copies and pickles without what is there."""

    def __init__(self) -> None:
        self._last: Callable[[], _Boundary | None] = lambda: None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, _: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def boundary(self, place: int) -> "_Boundary":
        """For the forward that the block at `place` in the order of the model is about to make."""
        last = self._last()
        made = _Boundary(place, last if last is not None and last.place < place else None)
        self._last = weakref.ref(made)
        return made


class Offload:
    """What one checkpointed block does with its inputs."""

    def __init__(self, memory: HostMemory, place: int, name: str) -> None:
        self.memory = memory
        self.place = place
        self.name = name

    @contextmanager
    def moving(self) -> Iterator[None]:
        """The context in which to call torch's checkpoint.

        Raises:
            ActivationCheckpointingError: the block has changed one of its inputs in place.
        """
        boundary = self.memory.boundary(self.place)
        try:
            with saved_tensors_hooks(boundary.pack, _unpack):
                yield
        finally:
            changed = boundary.settle()
        if changed:
            raise ActivationCheckpointingError(
                f"block '{self.name}' changes its input in place, and with offload 'cpu' that is being copied to the "
                "host meanwhile; leave offload at 'none', or make the change out of place"
            )


class _Boundary:
    """The inputs of one forward of a block. Held by what was moved, and by nobody else."""

    def __init__(self, place: int, before: "_Boundary | None") -> None:
        self.place = place
        self._before: Callable[[], _Boundary | None] = (lambda: None) if before is None else weakref.ref(before)
        self._moved: list[weakref.ref[_Moved]] = []
        self._leaving: list[tuple[Tensor, int, _Moved]] = []

    def pack(self, tensor: Tensor) -> "_Moved | _Stayed":
        if not (tensor.requires_grad and all(map(_can_be_copied, _parts(tensor)))):
            return _Stayed(tensor)
        moved = _Moved(tensor.detach(), self)
        self._moved.append(weakref.ref(moved))
        self._leaving.append((tensor, tensor._version, moved))
        return moved

    def settle(self) -> bool:
        """After the forward: wait for the copies. Whether an input was changed since it was packed."""
        leaving, self._leaving = self._leaving, []
        for _, _, moved in leaving:
            moved.wait()
        return any(tensor._version != version for tensor, version, _ in leaving)

    def fetch(self) -> None:
        """Start to bring everything back."""
        for reference in self._moved:
            if (moved := reference()) is not None:
                moved.fetch()

    def fetch_before(self) -> None:
        """The same for the block whose backward comes next."""
        if (before := self._before()) is not None:
            before.fetch()


class _Moved:
    """A tensor on the host."""

    __slots__ = ("__weakref__", "_back", "_boundary", "_copied", "_device", "_host")

    def __init__(self, tensor: Tensor, boundary: _Boundary) -> None:
        self._boundary = boundary
        self._device = tensor.device
        self._back: Tensor | None = None
        with _beside(self._device) as self._copied:
            self._host = _by_parts(tensor, _copy_to_host)

    def fetch(self) -> None:
        if self._back is None:
            with _beside(self._device) as self._copied:
                self._back = _by_parts(self._host, lambda part: _copy_to_device(part, self._device))

    def take(self) -> Tensor:
        self.fetch()
        assert self._back is not None
        back, self._back = self._back, None
        self.wait()
        self._boundary.fetch_before()
        return back

    def wait(self) -> None:
        """Whatever the current stream does from here on comes after the last copy."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


class _Stayed:
    """A tensor that is not moved. Hooks take autograd's own check of its version away."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def take(self) -> Tensor:
        if self._tensor._version != self._version:
            raise ActivationCheckpointingError(
                f"an input of shape {tuple(self._tensor.shape)} of a checkpointed block was modified in place since "
                "its forward, so the recompute would give gradients of another function; make the change out of place"
            )
        return self._tensor


def _unpack(packed: _Moved | _Stayed) -> Tensor:
    return packed.take()


@contextmanager
def _beside(device: torch.device) -> Iterator["torch.cuda.Event | None"]:
    """On CUDA, copies in here run on a stream beside the current one, after what is queued there now. The event at
    their end; None where copies are made at once."""
    if device.type != "cuda":
        yield None
        return
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    done = torch.cuda.Event()
    yield done
    done.record(stream)


@cache
def _stream(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)


def _copy_to_host(tensor: Tensor) -> Tensor:
    pinned = tensor.is_cuda
    token = _to_host.set(True)
    try:
        host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    finally:
        _to_host.reset(token)
    return _copy(host, tensor, tensor.device)


def _copy_to_device(host: Tensor, device: torch.device) -> Tensor:
    # Allocated for the current stream, on which it will be used and freed.
    back = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    if back.is_cuda:
        back.record_stream(_stream(device))  # it may be freed unused
    return _copy(back, host, device)


def _copy(to: Tensor, source: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return to.copy_(source)
    with torch.cuda.stream(_stream(device)):
        return to.copy_(source, non_blocking=True)


def _can_be_copied(part: Tensor) -> bool:
    """Strided, and no element of it stands for several: an expanded tensor is small where it is."""
    pairs = zip(part.stride(), part.size(), strict=True) if part.layout is torch.strided else [(0, 2)]
    return all(stride > 0 or size < 2 for stride, size in pairs)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a DTensor or another wrapper consists of."""
    found: list[Tensor] = []
    _by_parts(tensor, lambda part: found.append(part) or part)
    return found


def _by_parts(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor with each of its plain parts changed."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return change(tensor)
    names, context = tensor.__tensor_flatten__()
    inside = {name: getattr(tensor, name) for name in names}
    parts = {name: _by_parts(v, change) if isinstance(v, Tensor) else v for name, v in inside.items()}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
