"""Expert parallelism whose combine is kept, not replayed, when a checkpointed block is recomputed.

    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=ac_moe.context_fn("combine"))

Importing this package imports neither torch nor Megatron: a name loads its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ac_moe import experts, megatron, reference, routing
    from ac_moe.cache.contexts import context_fn
    from ac_moe.cache.reentrant import wrap_reentrant
    from ac_moe.cache.stats import Stats, reset_stats, stats
    from ac_moe.config import MoEConfig
    from ac_moe.dispatch.alltoall import AllToAllDispatcher
    from ac_moe.dispatch.base import Dispatched
    from ac_moe.dispatch.hybridep import HybridEPDispatcher
    from ac_moe.errors import MoETailError, RecomputeCacheError, RecomputeRoutingMismatchError
    from ac_moe.parallel.parallelize import parallelize
    from ac_moe.parallel.result import ExpertParallel

__version__ = "0.1.0"

__all__ = [
    "AllToAllDispatcher",
    "Dispatched",
    "ExpertParallel",
    "HybridEPDispatcher",
    "MoEConfig",
    "MoETailError",
    "RecomputeCacheError",
    "RecomputeRoutingMismatchError",
    "Stats",
    "__version__",
    "context_fn",
    "experts",
    "megatron",
    "parallelize",
    "reference",
    "reset_stats",
    "routing",
    "stats",
    "wrap_reentrant",
]

_HOME = {
    "AllToAllDispatcher": "ac_moe.dispatch.alltoall",
    "Dispatched": "ac_moe.dispatch.base",
    "ExpertParallel": "ac_moe.parallel.result",
    "HybridEPDispatcher": "ac_moe.dispatch.hybridep",
    "MoEConfig": "ac_moe.config",
    "MoETailError": "ac_moe.errors",
    "RecomputeCacheError": "ac_moe.errors",
    "RecomputeRoutingMismatchError": "ac_moe.errors",
    "Stats": "ac_moe.cache.stats",
    "context_fn": "ac_moe.cache.contexts",
    "parallelize": "ac_moe.parallel.parallelize",
    "reset_stats": "ac_moe.cache.stats",
    "stats": "ac_moe.cache.stats",
    "wrap_reentrant": "ac_moe.cache.reentrant",
}
_SUBMODULES = ("config", "errors", "experts", "megatron", "reference", "routing")


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"ac_moe.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ac_moe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
