"""What is asked of PyTorch's dispatcher and tracer by private names."""

from collections.abc import Callable
from contextlib import AbstractContextManager
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
try:
    from torch._guards import TracingContext
    from torch.utils._python_dispatch import _disable_current_modes
except ImportError as error:
    raise ImportError(
        "ac-moe needs torch.utils._python_dispatch._disable_current_modes and torch._guards.TracingContext, which "
        f"torch 2.11 to 2.13 have and torch {torch.__version__} has not. Install a torch between them, or report this "
        "to ac-moe."
    ) from error


def without_dispatch_modes() -> AbstractContextManager[object]:
    """A context in which no TorchDispatchMode sees an operator; see NOTE [ Out of sight of dispatch modes ]."""
    return _disable_current_modes()


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
