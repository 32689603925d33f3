"""Kept calls: made once in the forward of a region, and jumped over in its recompute."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ac_core.region.tracing import never_compiled, never_compiled_alone
from ac_core.selective.effects import Effects, is_plain
from ac_core.selective.random import RandomState
from ac_core.selective.saved import CallSaves, discarded, hand_to_region

Key = tuple[str, str, int]
"""A call inside a block: path of the module that makes it, what it calls, and how many times it has before."""


@dataclass(slots=True)
class _Output:
    """One tensor of a kept call's result, or the place of the input that was returned as it came."""

    tensor: Tensor | None
    version: int = 0
    requires_grad: bool = False
    input: int | None = None

    @property
    def unchanged(self) -> bool:
        return self.tensor is None or self.tensor._version == self.version

    def serve(self, inputs: list[Tensor]) -> Tensor:
        if self.tensor is None:
            return inputs[self.input]  # type: ignore[index]
        # An alias: what the block does to it in place must not reach the kept tensor.
        return self.tensor.detach().requires_grad_(self.requires_grad)


@dataclass(slots=True)
class Kept:
    """What the forward leaves of a kept call for the recompute.

    handed: which inputs the region gives back. outputs: the result, gone once it was served: a second backward makes
    the call again. random: the generators' states after the call, if it drew. held: bytes that its autograd nodes hold,
    by storage. dropped: the plan says that no recompute asks for the result. spoiled: a recompute cannot go on from the
    result, and makes the call again.
    """

    handed: tuple[int, ...]
    outputs: list[Any] | None
    spec: TreeSpec | None
    random: RandomState | None
    held: dict[int, int]
    dropped: bool = False
    spoiled: bool = False


@dataclass
class Region:
    """One forward of a block, and its recomputes.

    decision: what to keep, settled when the forward begins: a recompute must do as its forward did, whatever has been
    learnt in between. observer: watches the calls, in a block's first step. mode: the function mode that is on. hooks:
    where the region's saved tensors go: a call under hooks of somebody else, such as a checkpoint in the block, is not
    kept.
    """

    plan: Any
    decision: Any
    observer: Any = None
    kept: dict[Key, Kept] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    recomputing: bool = False
    mode: Any = None
    hooks: Any = None

    def key(self, path: str, what: str) -> Key:
        count = self.counts.get((path, what), 0)
        self.counts[path, what] = count + 1
        return path, what, count


class _Local(threading.local):
    def __init__(self) -> None:
        self.regions: list[Region | Key | None] = []


_LOCAL = _Local()


def current_region() -> Region | None:
    """The innermost region that runs in this thread; None outside of regions and inside of a kept call."""
    top = _LOCAL.regions[-1] if _LOCAL.regions else None
    return top if isinstance(top, Region) else None


def current_kept_call() -> str | None:
    """The kept call that runs in this thread, as `path.function`; None outside of kept calls."""
    top = _LOCAL.regions[-1] if _LOCAL.regions else None
    return ".".join(filter(None, top[:2])) if isinstance(top, tuple) else None


@contextmanager
def entered(region: Region | Key | None) -> Iterator[None]:
    """Makes `region` the current one of this thread. With a kept call, or None, in its place nothing is kept, whatever
    region is outside."""
    _LOCAL.regions.append(region)
    try:
        yield
    finally:
        _LOCAL.regions.pop()


@never_compiled_alone
def keep(
    region: Region,
    key: Key,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    draws: bool,
    effects: Effects | None = None,
) -> Any:
    """Make the call in a forward, keeping its output; or, in a recompute, go on from the kept output.

    draws: whether the call may draw random numbers. effects: tells what else it does; None: nothing. A call that does
    more than give its result is made again in the recompute.
    """
    inputs = list(tensors_in((*args, *kwargs.values())))
    if region.recomputing:
        return _serve(region.kept[key], lambda: function(*args, **kwargs), inputs)
    saves = CallSaves(inputs)
    before = RandomState.of(inputs) if draws else None
    kept = region.kept[key] = Kept((), None, None, None, saves.held)  # as it stays if the call raises
    with entered(key), saves.hooks():
        result = function(*args, **kwargs)
    after = RandomState.of(inputs) if before is not None else None
    leaves, spec = ([result], None) if isinstance(result, Tensor) else tree_flatten(result)
    kept.spoiled = (
        saves.changed_inputs()
        or (effects is not None and effects.changed() is not None)
        or not all(map(is_plain, leaves))
    )
    kept.dropped = key[0] in region.decision.unasked
    kept.handed = saves.hand_over()
    if not (kept.spoiled or kept.dropped):
        kept.outputs, kept.spec = [_output(leaf, inputs) for leaf in leaves], spec
        kept.random = after if after != before else None
    return result


@never_compiled_alone
def _serve(kept: Kept, call: Callable[[], Any], inputs: list[Tensor]) -> Any:
    outputs, kept.outputs = kept.outputs, None
    if outputs is not None and not all(o.unchanged for o in outputs if isinstance(o, _Output)):
        outputs, kept.spoiled = None, True  # the block has changed it in place since
    try:
        for index in kept.handed:
            hand_to_region(inputs[index])
    except BaseException:
        # The region ends the recompute right here, with the last tensor that it needs, and this call was not needed.
        kept.outputs = outputs
        raise
    kept.dropped = False
    if outputs is None:
        # There is no result, or none any more: it was served before. The inputs are the forward's: make the call.
        with entered(None), discarded():
            return call()
    if kept.random is not None:
        kept.random.restore()
    values = [o.serve(inputs) if isinstance(o, _Output) else o for o in outputs]
    return values[0] if kept.spec is None else tree_unflatten(values, kept.spec)


@never_compiled
def _output(leaf: Any, inputs: list[Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    for index, given in enumerate(inputs):
        if given is leaf:
            return _Output(None, input=index)
    kept = leaf.detach()  # of a collective under way: waits for it, and is a tensor of another class
    return _Output(kept, kept._version, leaf.requires_grad)


@never_compiled
def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
