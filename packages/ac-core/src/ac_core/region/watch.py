"""Who wants to see the runs of checkpointed blocks: a trace. Nobody does, most of the time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn

Watcher = Callable[[nn.Module, str, object, bool], AbstractContextManager[Any]]
"""`(block, name, run, recomputing) -> context` to run the block in; `run` is one object for a forward and its
recomputes."""

_WATCHERS: list[Watcher] = []


def watched() -> bool:
    """Whether anybody watches."""
    return bool(_WATCHERS)


def add_watcher(watcher: Watcher) -> None:
    """From now on enter `watcher(...)` around every forward and recompute of a checkpointed block."""
    _WATCHERS.append(watcher)


def remove_watcher(watcher: Watcher) -> None:
    """Undo `add_watcher`."""
    _WATCHERS.remove(watcher)


def watching(block: nn.Module, name: str, run: object, *, recomputing: bool) -> AbstractContextManager[Any]:
    """The contexts of all watchers."""
    stack = ExitStack()
    for watcher in _WATCHERS:
        stack.enter_context(watcher(block, name, run, recomputing))
    return stack
