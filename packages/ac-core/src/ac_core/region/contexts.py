"""Composing what different packages need around a checkpointed block.

PyTorch's shape for that is `context_fn() -> (forward_context, recompute_context)`: it is called once for each forward
of a region. `compose` puts any number of them into one.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class ComposedContextFn:
    """Several context functions as one: the first is the outermost. Pickles and copies if they do."""

    def __init__(self, context_fns: Iterable[ContextFn]) -> None:
        self.context_fns = tuple(context_fns)

    def __call__(self) -> tuple["_Nested", "_Nested"]:
        pairs = [context_fn() for context_fn in self.context_fns]
        return _Nested([forward for forward, _ in pairs]), _Nested([recompute for _, recompute in pairs])


class _Nested:
    """Enters its contexts in order and leaves them in reverse.

    NOTE [ Re-enterable contexts ]
    A second backward over a retained graph enters the recompute context again, so a generator-based context manager,
    which works once, will not do here. Each entry therefore keeps its own list of what it entered.
    """

    def __init__(self, contexts: list[AbstractContextManager[Any]]) -> None:
        self._contexts = contexts
        self._entered: list[list[AbstractContextManager[Any]]] = []

    def __enter__(self) -> None:
        entered: list[AbstractContextManager[Any]] = []
        self._entered.append(entered)
        try:
            for context in self._contexts:
                context.__enter__()
                entered.append(context)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What a context returns is not used: none of them may swallow an error of the block.
        for context in reversed(self._entered.pop()):
            context.__exit__(kind, error, traceback)
