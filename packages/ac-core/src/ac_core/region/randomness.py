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
from typing import Any, NamedTuple

import torch
from torch import nn

from ac_core.region.layout import Layout


class Source(NamedTuple):
    """A generator of random numbers by what reads and sets its state. Equal states compare equal."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


_State = tuple[Source, Any]


class ReplayedRandomness:
    """The part of a block's state that is in shared generators. A `Part`, see `region/state.py`.

    Python's and NumPy's generators are watched for a block whose own code can name them, by an import in the file of
    one of its classes: reading their state takes longer than everything else that is kept.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._host: list[Source] = []

    def note(self, layout: Layout) -> list[_State]:
        return [(source, source.read()) for source in self._sources(layout)]

    def settle(self, noted: list[_State], _failed: bool) -> None:
        noted[:] = [(source, state) for source, state in noted if source.read() != state]

    def restore(self, noted: list[_State]) -> list[_State]:
        live = [(source, source.read()) for source, _ in noted]
        _write(noted)
        return live

    def release(self, _noted: list[_State], taken: list[_State]) -> None:
        _write(taken)

    def _sources(self, layout: Layout) -> list[Source]:
        if layout.modules is not self._modules:
            names = frozenset().union(*(named_in_files_of(type(module)) for module in layout.modules))
            self._modules, self._host = layout.modules, [HOST[name] for name in sorted(names)]
        devices = {p.device for holder in layout.parameters for p in holder.values() if p is not None}
        return self._host + [source for device in devices if (source := _of_device(device)) is not None]


def _write(states: list[_State]) -> None:
    for source, state in states:
        source.write(state)


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


def _read_numpy() -> tuple[Any, ...]:
    name, keys, *rest = sys.modules["numpy"].random.get_state()
    return (name, keys.tobytes(), *rest)


def _write_numpy(state: tuple[Any, ...]) -> None:
    numpy = sys.modules["numpy"]
    name, keys, *rest = state
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


HOST = {"numpy": Source(_read_numpy, _write_numpy), "random": Source(random.getstate, random.setstate)}
"""Generators that Python code shares, by the names of `named_in_files_of`."""


@cache
def named_in_files_of(kind: type[nn.Module]) -> frozenset[str]:
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
