"""Whether a call runs or is being traced, and code that torch.compile must not take up by itself."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., object])

# Nothing public says "inline this where a larger frame is traced, but do not compile it by itself". A test watches it.
_dynamo = torch._C._dynamo.eval_frame


def never_compiled_alone(function: F) -> F:
    """Marks a function that asks whether it is traced.

    Where torch.compile cannot put a region into its graph (a block that counts up an attribute), it leaves the call to
    Python. It would then compile the functions called there one by one, and in each of them `is_compiling()` holds: a
    region that runs in Python would be taken for one that does not. As part of a larger frame the function is traced
    like any other.
    """
    return _skipped(function, "DEFAULT")


def never_compiled(function: F) -> F:
    """Marks a function that runs in Python, with all that it calls, even where a compiled module calls back to it."""
    return _skipped(function, "SKIP")


def _skipped(function: F, what_it_calls: str) -> F:
    if hasattr(_dynamo, "set_code_exec_strategy"):
        action = _dynamo._FrameAction
        strategy = _dynamo._FrameExecStrategy(action.SKIP, getattr(action, what_it_calls))
        _dynamo.set_code_exec_strategy(function.__code__, strategy)  # type: ignore[attr-defined]
    return function


@never_compiled_alone
def is_traced() -> bool:
    """Is this call being traced rather than run? `torch.compile` and `make_fx` can trace a checkpoint only without a
    context function, and no recompute happens in Python then."""
    return is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
