"""Sees the calls of Megatron's activation checkpoint that one module makes, and no others."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeAlias

Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

# NOTE [ Seeing Megatron's checkpoint ]
#
# Megatron checkpoints chunks of layers, or an MoE layer, by calling `tensor_parallel.checkpoint(function, distribute,
# *tensors)` from inside a method, with a function made on the spot. That call is where a chunk begins and ends, and the
# identity of the function is what ties its recompute to its forward. Neither can be had from the module's methods, and
# where the call stands differs between releases (transformer_block.py in 0.16 and 0.17, recompute.py since 0.18).
#
# 1. So for the time that a module's own forward runs, `tensor_parallel.checkpoint` is `_Seen`; then it is what it was
#    before. It calls what it replaces; other threads, and modules that are not enabled, get just that.
# 2. Entering is counted, for modules in modules and for threads; the last to leave puts back the original.
# 3. What a thread wants done is kept by thread. The innermost module's wish counts.
# 4. A recompute needs nothing of this: it calls the function that was wrapped in the forward.
# 5. If Megatron checkpointed without this call, nothing would be kept and nobody would know. So `Sight.seen` counts.


class Sight:
    """One run of one module's forward."""

    def __init__(self, wrap: Wrap) -> None:
        self.wrap = wrap
        self.seen = 0


class _Wishes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Sight] = []


class _Seen:
    """In the place of `tensor_parallel.checkpoint`; see NOTE [ Seeing Megatron's checkpoint ]."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.users = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _wishes.stack:
            call = _wishes.stack[-1]
            call.seen += 1
            function = call.wrap(function)
        return self.original(function, *args, **kwargs)


_wishes = _Wishes()
_lock = threading.Lock()


@contextlib.contextmanager
def checkpoints_seen(wrap: Wrap) -> Iterator[Sight]:
    """In here, what this thread gives to Megatron's checkpoint is wrapped first. `Sight.seen` counts the calls."""
    from megatron.core import tensor_parallel

    seen = _enter(tensor_parallel)
    call = Sight(wrap)
    _wishes.stack.append(call)
    try:
        yield call
    finally:
        _wishes.stack.remove(call)
        _leave(tensor_parallel, seen)


def _enter(module: ModuleType) -> _Seen:
    with _lock:
        if not isinstance(module.checkpoint, _Seen):
            module.checkpoint = _Seen(module.checkpoint)
        module.checkpoint.users += 1
        return module.checkpoint


def _leave(module: ModuleType, seen: _Seen) -> None:
    with _lock:
        seen.users -= 1
        if seen.users == 0 and module.checkpoint is seen:
            module.checkpoint = seen.original
