"""Shared random numbers that torch's checkpoint does not replay: other devices', Python's and NumPy's.

torch notes the default generators of the CPU and of the devices that the inputs of a region lie on. A block whose
weights lie elsewhere (a model spread over several devices, its inputs moved inside the block) draws from another one,
and a block may draw from `random` or `numpy.random`. Each such generator that a forward advanced is put back for the
recompute; where a forward drew nothing from it, nothing is done.
"""

import random
import sys
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from ac_core.region.walk import modules_of


class Source(NamedTuple):
    """A generator of random numbers by what reads and sets its state. Equal states compare equal."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


class ReplayedRandomness:
    """A context function, `() -> (forward, recompute)`, for one block.

    Python's and NumPy's generators are watched for a block whose own code can name them, by an import in the file of
    one of its classes: reading their state takes longer than everything else that is kept.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.host = sorted(set().union(*(_named_in_files_of(type(module)) for module in modules_of(block))))

    def __call__(self) -> tuple["_Forward", "_Recompute"]:
        forward = _Forward(self)
        return forward, _Recompute(forward)

    def sources(self) -> list[Source]:
        devices = {p.device for m in modules_of(self.block) for p in m._parameters.values() if p is not None}
        sources = [source for device in devices if (source := _of_device(device)) is not None]
        return sources + [_HOST[name]() for name in self.host]


def _of_device(device: torch.device) -> Source | None:
    if device.type in ("cpu", "meta", "mps"):  # none, or the one that torch's checkpoint looks at
        return None
    module = torch.get_device_module(device)
    if not module.is_available() or not getattr(module, "is_initialized", lambda: True)():
        return None  # a fake tensor's
    return Source(lambda: _Bytes(module.get_rng_state(device)), lambda state: module.set_rng_state(state.state, device))


class _Bytes:
    """The state of a device's generator, a byte tensor, compared by value."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes) and torch.equal(self.state, other.state)

    __hash__ = None  # type: ignore[assignment]


def _pythons() -> Source:
    return Source(random.getstate, random.setstate)


def _numpys() -> Source:
    numpy = sys.modules["numpy"]

    def read() -> tuple[Any, ...]:
        name, keys, *rest = numpy.random.get_state()
        return (name, keys.tobytes(), *rest)

    def write(state: tuple[Any, ...]) -> None:
        name, keys, *rest = state
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))

    return Source(read, write)


_HOST = {"numpy": _numpys, "random": _pythons}


@cache
def _named_in_files_of(kind: type[nn.Module]) -> frozenset[str]:
    """Which of Python's and NumPy's generators the files of a module's class and of its bases have a name for."""
    files = [sys.modules.get(base.__module__) for base in kind.__mro__ if base not in nn.Module.__mro__]
    names = [value for file in files if file is not None for value in list(vars(file).values())]
    found = set()
    if any(value is random or getattr(value, "__self__", None) is random.random.__self__ for value in names):
        found.add("random")
    if numpy := sys.modules.get("numpy"):
        shared = numpy.random.random.__self__
        if any(v is numpy or v is numpy.random or getattr(v, "__self__", None) is shared for v in names):
            found.add("numpy")
    return frozenset(found)


class _Forward:
    def __init__(self, replayed: ReplayedRandomness) -> None:
        self._replayed = replayed
        self._noted: list[tuple[Source, Any]] = []
        self.advanced: list[tuple[Source, Any]] = []

    def __enter__(self) -> None:
        self._noted = [(source, source.read()) for source in self._replayed.sources()]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        noted, self._noted = self._noted, []
        self.advanced = [(source, state) for source, state in noted if source.read() != state]


class _Recompute:
    """May be entered again, for a second backward."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._live: list[list[tuple[Source, Any]]] = []

    def __enter__(self) -> None:
        advanced = self._forward.advanced
        self._live.append([(source, source.read()) for source, _ in advanced])
        for source, state in advanced:
            source.write(state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for source, state in self._live.pop():
            source.write(state)
