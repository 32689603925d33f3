"""What autograd's engine tells of a backward that is running: the one place that asks it by private names."""

import sys
from typing import Any

import torch

# NOTE [ The node of a reentrant checkpoint ]
#
# A reentrant checkpoint is an autograd.Function that calls the block in its forward, with gradients off, and again in
# its backward. Nothing passes between the two calls but the node of the function, `ctx`.
#
# 1. In the backward the engine says which node is running: `torch._C._current_autograd_node()`.
# 2. In the forward nobody says it. It is the variable `ctx` of the frame that calls the block, in PyTorch's
#    `CheckpointFunction.forward` as in those of Megatron-core and DeepSpeed, which put the block into
#    `ctx.run_function` before they call it.
# 3. Whether gradients were on outside, where the checkpoint was called, is seen from the node: only if they were, and
#    an input needs one, does it have next functions.
# 4. `_get_current_graph_task_keep_graph` tells `backward(retain_graph=True)` from the last backward.
_NEEDED = ((torch._C, "_current_autograd_node"), (torch._C._autograd, "_get_current_graph_task_keep_graph"))
for _module, _name in _NEEDED:
    if not hasattr(_module, _name):
        raise ImportError(
            f"ac-moe needs {_module.__name__}.{_name} for reentrant checkpoints, which torch 2.11 to 2.13 have and "
            f"torch {torch.__version__} has not. Install a torch between them, or report this to ac-moe."
        )


def checkpoint_in_forward() -> Any | None:
    """The node of the reentrant checkpoint whose forward is calling, or None.

    None as well if gradients were off where that checkpoint was called, so that no backward will come.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # Before Python 3.13 `f_locals` leaves references to all locals behind until the frame ends. So it is asked for
        # in methods of a Function alone, and not in a training loop that calls its autocast `ctx`.
        if code.co_name in ("forward", "backward") and code.co_argcount and code.co_varnames[0] == "ctx":
            node = frame.f_locals["ctx"]
            if hasattr(node, "run_function"):
                differentiable = any(function is not None for function, _ in node.next_functions)
                return node if code.co_name == "forward" and differentiable else None
        frame = frame.f_back
    return None


def running_node() -> Any | None:
    """The node whose backward is running on this thread: for a reentrant checkpoint its `ctx`."""
    return torch._C._current_autograd_node()


def graph_is_kept() -> bool:
    """Whether the backward that is running was asked to `retain_graph`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
