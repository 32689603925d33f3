"""The recompute cache for reentrant checkpoints, which take a function and no contexts."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ac_moe.cache.contexts import Mode, RegionContext, check_mode
from ac_moe.cache.engine import checkpoint_in_forward, graph_is_kept, running_node
from ac_moe.cache.region import Phase, Region, in_region
from ac_moe.errors import RecomputeCacheError

# NOTE [ How long a reentrant checkpoint keeps ]
#
# 1. The region hangs on the checkpoint's node, beside the inputs that it saved, and on nothing else: dropping the
#    output drops it. The wrapped function holds no state, so it may be made once or for every call.
# 2. The node outlives its backward where the loss does. So the recompute empties the region when it has run, unless
#    the backward was asked to retain the graph.
_ATTRIBUTE = "_ac_moe_regions"


def wrap_reentrant(function: Callable[..., Any], mode: Mode, *, pin_routing: bool = False) -> Callable[..., Any]:
    """Wraps what is given to `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`, or to Megatron-core's.

        checkpoint(ac_moe.wrap_reentrant(block, "combine"), x, use_reentrant=True)

    What `context_fn` does for a checkpoint without reentry. The wrapped function may be kept and used for many calls,
    also in flight together; it can be pickled and deep-copied if `function` can. Called outside of a reentrant
    checkpoint, or without gradients, it is `function`.

    Args:
        function: the block. Once in a checkpoint: wrap what the checkpoint is given, not a part of it that runs twice.
        mode, pin_routing: see `context_fn`.

    Raises:
        ValueError: `mode` is none of the modes of this version.
        TypeError: `function` is not callable.
    """
    check_mode(mode)
    if not callable(function):
        raise TypeError(f"function: {function!r} is not callable; give the block that the checkpoint runs")
    if mode == "none" and not pin_routing:
        return function
    wrapped = _Reentrant(function, mode)
    functools.update_wrapper(wrapped, function, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    return wrapped


@dataclasses.dataclass(eq=False)
class _Reentrant:
    function: Callable[..., Any]
    mode: str

    @torch.compiler.disable(reason="the checkpoint's node is found from the frame that calls, which tracing has not")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self._recompute() if torch.is_grad_enabled() else self._forward()
        if context is None:
            return self.function(*args, **kwargs)
        with context as region:
            result = self.function(*args, **kwargs)
        if torch.is_grad_enabled() and not graph_is_kept():
            region.clear()
        return result

    def _forward(self) -> RegionContext | None:
        node = checkpoint_in_forward()
        if node is None:
            return None
        regions = vars(node).setdefault(_ATTRIBUTE, {})
        if self in regions:
            raise RecomputeCacheError(
                f"{self.function!r}: wrapped, it is called twice in one reentrant checkpoint, so that its calls cannot "
                "be told apart in the recompute. Wrap the function that the checkpoint is given: "
                "checkpoint(ac_moe.wrap_reentrant(function, mode), ..., use_reentrant=True)."
            )
        regions[self] = Region(self.mode, reentrant=True)
        return RegionContext(regions[self], Phase.FORWARD)

    def _recompute(self) -> RegionContext | None:
        node = running_node()
        region = getattr(node, _ATTRIBUTE, {}).get(self)
        if region is not None:
            return RegionContext(region, Phase.RECOMPUTE)
        if node is not None and not in_region():
            name = getattr(self.function, "__qualname__", type(self.function).__name__)
            warnings.warn(
                f"{name}: is recomputed by a checkpoint that is not reentrant, for which wrap_reentrant does nothing, "
                f"so mode {self.mode!r} is not applied. Give that checkpoint "
                f"context_fn=ac_moe.context_fn({self.mode!r}) instead, or use_reentrant=True",
                stacklevel=3,
            )
        return None
