"""What is asked of PyTorch's dispatcher and tracer by private names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# NOTE [ Out of sight of dispatch modes ]
#
# Selective checkpointing numbers the calls of each operator, in the forward and in the recompute, and matches a saved
# output by its number (torch/utils/checkpoint.py, `func_counter`). A combine that is served runs fewer operators than
# one that is computed, so every later number would be off by a few and a wrong tensor be used without an error.
#
# 1. Whatever the dispatcher runs between tokens and rows is therefore hidden from dispatch modes, in both phases.
# 2. This holds for the dispatch too, which is not skipped: `c10d.alltoall_base_` writes into a buffer that it is
#    given. A policy that saved "the collective" would skip that write in the recompute and leave the buffer
#    uninitialised.
# 3. Leaving modes is not public. A wrapper subclass or a custom operator would still be seen by the mode.
# 4. A mode that only watches may see everything, and a meter of memory has to. Such modes say so by an attribute,
#    `needs_every_operation = True`. Fake tensors stay on, for what is created there must be fake too.
try:
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import (
        _disable_current_modes,
        _get_current_dispatch_mode_stack,
        _pop_mode,
        _push_mode,
    )
except ImportError as error:
    raise ImportError(
        f"ac-moe needs private parts of torch that torch 2.11 to 2.13 have and torch {torch.__version__} has not "
        f"({error}). Install a torch between them, or report this to ac-moe."
    ) from error


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """A context in which no TorchDispatchMode sees an operator, but those that need every one; see NOTE [ Out of sight
    of dispatch modes ]."""
    with _disable_current_modes() as hidden:
        needed = [mode for mode in reversed(hidden) if _needs_every_operation(mode)]
        for mode in needed:
            _push_mode(mode)
        try:
            yield
        finally:
            for mode in reversed(needed):
                _pop_mode(getattr(mode, "_mode_key", None))


def _needs_every_operation(mode: TorchDispatchMode) -> bool:
    return isinstance(mode, FakeTensorMode) or getattr(mode, "needs_every_operation", False)


def is_answered(op: Any) -> bool:
    """Whether a dispatch mode is on that says, in its attribute `answers`, that it computes `op` itself."""
    return any(op in getattr(mode, "answers", ()) for mode in _get_current_dispatch_mode_stack())


def dynamo_is_tracing() -> bool:
    """Whether torch.compile is looking at what the running frame has; `torch.compiler.is_compiling` is False there."""
    return TracingContext.try_get() is not None


class answering(TorchDispatchMode):  # noqa: N801, a context that is read as a verb
    """A context in which calls of `op` return what `answer` makes of their arguments.

    Autograd is above dispatch modes: the call builds the node that it always builds, and packs what that saves.
    """

    def __init__(self, op: Any, answer: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._op, self._answer = op, answer

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (self._answer if func is self._op else func)(*args, **(kwargs or {}))
