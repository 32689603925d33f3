"""What a recompute can see that its forward did not: state of the block and settings of torch, and how they changed."""

import hashlib
import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PLAIN = frozenset(
    {bool, int, float, complex, str, type(None), type, torch.dtype, torch.device, torch.Size, torch.layout}
)
"""Types of values that a snapshot may hold on to: none of them keeps a tensor alive. `type` stands for any other."""

_CONSTANT = frozenset({"torch.nn.modules.linear", "torch.nn.modules.normalization"})
"""Where modules come from whose plain attributes are sizes, and which do not care for `training`: most of a block."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_AUTOCAST = {"cpu": "autocast on the CPU", "cuda": "autocast on the GPU"}

_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the flash SDPA backend": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "the memory-efficient SDPA backend": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "the math SDPA backend": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "the cuDNN SDPA backend": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    _AUTOCAST["cuda"]: (
        partial(torch.is_autocast_enabled, "cuda"),
        partial(torch.set_autocast_enabled, "cuda"),
    ),
    _AUTOCAST["cpu"]: (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
}
_READ_SETTINGS = tuple(read for read, _ in _SETTINGS.values())


class Change(NamedTuple):
    """A value that is another one now. path: `attn.top_k` inside the block, or the name of a setting."""

    path: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.path} was {_shown(self.was)} in the forward and is {_shown(self.now)} now"


class Extent(NamedTuple):
    """How long a container is, or how large a tensor; version: how often the tensor was written in place."""

    size: tuple[int, ...]
    version: int = 0

    def __str__(self) -> str:
        return str(self.size[0] if len(self.size) == 1 else list(self.size))


class _Reader(NamedTuple):
    attributes: dict[str, Any]
    names: tuple[str, ...]
    get: Callable[[dict[str, Any]], tuple[Any, ...]]


class Snapshot(NamedTuple):
    """Plain attributes of a block's modules and the settings of torch, at one moment."""

    readers: tuple[_Reader, ...]
    values: list[Any]

    def autocast(self, device: str) -> bool:
        names = list(_SETTINGS)
        return bool(self.values[names.index(_AUTOCAST.get(device, _AUTOCAST["cpu"])) - len(names)])


class PlainState:
    """Takes snapshots of a block: of numbers, flags, strings and dtypes in attributes of its modules (`training` is
    one), and of torch's settings. A few microseconds each: it is taken in every forward."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._readers: tuple[_Reader, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": ()}  # a copy of the block has attributes of its own

    def read(self) -> Snapshot:
        readers, values = self._readers, list[Any]()
        try:
            for attributes, _, get in readers:
                values.extend(get(attributes))
        except KeyError:  # an attribute is gone
            readers = ()
        if not readers:
            modules = (m for m in self._block.modules() if type(m).__module__ not in _CONSTANT)
            readers = self._readers = tuple(map(_reader, modules))
            values = [value for attributes, _, get in readers for value in get(attributes)]
        if not _PLAIN.issuperset(map(type, values)):
            values = list(map(_plain, values))
        values.extend([read() for read in _READ_SETTINGS])
        return Snapshot(readers, values)

    def changes(self, then: Snapshot) -> list[Change]:
        """What is different now."""
        return [Change(path, was, _plain(now)) for path, was, now, _ in self._compare(then) if differ(was, _plain(now))]

    @contextmanager
    def as_it_was(self, then: Snapshot, paths: Collection[str]) -> Iterator[None]:
        """What lies at `paths` is as it was, for the time of this context."""
        changed = [
            (put, was, now)
            for path, was, now, put in self._compare(then)
            if path in paths and not isinstance(was, type)
        ]
        try:
            for put, was, _ in changed:
                put(was)
            yield
        finally:
            for put, _, now in changed:
                put(now)

    def _compare(self, then: Snapshot) -> Iterator[tuple[str, Any, Any, Callable[[Any], Any]]]:
        """Path, value then, value now, and what sets it."""
        paths = {id(vars(module)): name for name, module in self._block.named_modules()}
        values = iter(then.values)
        for attributes, names, _ in then.readers:
            module = paths.get(id(attributes), "")
            for name in names:
                path = f"{module}.{name}" if module else name
                yield path, next(values), attributes.get(name), partial(attributes.__setitem__, name)
        for (setting, (read, put)), was in zip(_SETTINGS.items(), values, strict=True):
            yield setting, was, read(), put


def differ(was: object, now: object) -> bool:
    return was is not now and was != now  # NaN is itself


def _reader(module: nn.Module) -> _Reader:
    attributes = vars(module)
    more = [n for n, value in attributes.items() if n not in _OF_EVERY_MODULE and type(value) in _PLAIN]
    names = ("training", *more)
    return _Reader(attributes, names, itemgetter(*names) if more else lambda a: (a["training"],))


def _plain(value: object) -> object:
    return value if type(value) in _PLAIN else type(value)


def _shown(value: object) -> str:
    return f"a {value.__name__}" if isinstance(value, type) else repr(value)


def describe_state(block: nn.Module, arguments: tuple[Any, ...]) -> dict[str, object]:
    """All state that a run of `block` could change, found from its modules and arguments: path -> what it is like.

    Containers and tensors by their extent, generators by a digest. Plain objects are looked into,
    three deep. Parameters and buffers are left out: others keep those.
    """
    described: dict[str, object] = {}
    seen: set[int] = set()
    for name, module in block.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "training" or attribute not in _OF_EVERY_MODULE:
                _describe(value, f"{name}.{attribute}" if name else attribute, 3, described, seen)
    for argument in arguments:
        _describe(argument, f"an argument ({type(argument).__name__})", 3, described, seen)
    described[PYTHON_RANDOM] = hash(random.getstate())
    if "numpy" in sys.modules:
        described[NUMPY_RANDOM] = _digest(repr(sys.modules["numpy"].random.get_state(legacy=False)).encode())
    return described


PYTHON_RANDOM, NUMPY_RANDOM, GENERATOR = "Python's `random`", "`numpy.random`", "generator "


def _describe(value: Any, path: str, depth: int, out: dict[str, object], seen: set[int]) -> None:
    if type(value) in _PLAIN:
        out[path] = value
        return
    if id(value) in seen or len(out) > 4096:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        out[path] = Extent(tuple(value.shape), 0 if value.is_inference() else value._version)
    elif (state := _generator_state(value)) is not None:
        out[GENERATOR + path] = state
    elif isinstance(value, (nn.Module, type)) or callable(value) or depth == 0:
        return
    elif isinstance(value, dict):
        out[path] = Extent((len(value),))
        for key, item in list(value.items())[:64]:
            _describe(item, f"{path}[{key!r}]", depth - 1, out, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        out[path] = Extent((len(value),))
        for number, item in enumerate(list(value)[:64]):
            _describe(item, f"{path}[{number}]", depth - 1, out, seen)
    elif hasattr(value, "__dict__"):
        for name, item in list(vars(value).items()):
            _describe(item, f"{path}.{name}", depth - 1, out, seen)


def _generator_state(value: Any) -> object | None:
    """A digest of the state of a random number generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return _digest(bytes(value.get_state().tolist()))
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
        return _digest(repr(value.bit_generator.state).encode())
    return None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@contextmanager
def undisturbed(block: nn.Module) -> Iterator[None]:
    """Random numbers and attributes of the block's modules are afterwards what they were; of lists and dicts in
    attributes, the entries are."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    attributes = [(vars(module), dict(vars(module))) for module in block.modules()]
    own = [value for _, kept in attributes for name, value in kept.items() if name not in _OF_EVERY_MODULE]
    containers = [(value, value.copy()) for value in own if type(value) in (list, dict, set)]
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        for live, kept in attributes:
            for name in [name for name, value in live.items() if value is not kept.get(name, live)]:
                del live[name]
            live.update(kept)
        for container, kept in containers:
            container.clear()
            container.extend(kept) if isinstance(container, list) else container.update(kept)
