"""Megatron's router in a checkpointed region: it routes as it did in the forward, and what it counts, it counts once."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ac_moe.cache.region import Site, claim
from ac_moe.megatron.replacement import Replacement
from ac_moe.routing import pin

# NOTE [ A router counts in the forward ]
#
# Megatron's router adds to buffers (expert load, global auxiliary loss) and to sums that are logged (auxiliary losses),
# if gradients are on. So a non-reentrant checkpoint counts twice, and a reentrant one counts in the recompute, in the
# order in which backwards come. The global auxiliary loss reads what it adds to: its gradients would depend on that.
#
# 1. In the forward of a region the router always counts. Where a reentrant checkpoint has turned gradients off, they are
#    on for the router, and its outputs leave without the graph.
# 2. In the recompute the router finds its buffers as they were in that forward, and what it adds is dropped.
# 3. The buffers are exchanged and not written to: what a graph has saved of them keeps its version.
# 4. The logits are those of the forward. All that follows is the same computation of the same numbers.

STATE = "router state"


class Gating(Replacement):
    """`router.gating`: the logits of the forward, through an identity, in each recompute."""

    def __init__(self, router: nn.Module, site: Site) -> None:
        super().__init__(router, "gating")
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return pin(self.site, self.original(*args, **kwargs))


class RouterForward(Replacement):
    """`router.forward`; see NOTE [ A router counts in the forward ]."""

    def __init__(self, router: nn.Module, site: Site) -> None:
        super().__init__(router, "forward")
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        claimed = claim(self.site, STATE)
        if claimed.kept is not None:
            claimed.pass_on()
            with _as_it_was(self.owner, claimed.kept.value):
                return self.original(*args, **kwargs)
        if not claimed.keepers:
            return self.original(*args, **kwargs)
        claimed.keep({name: buffer.clone() for name, buffer in self.owner.named_buffers(recurse=False)})
        if torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        with torch.enable_grad():
            outputs = self.original(*args, **kwargs)
        return tuple(output.detach() for output in outputs)


@contextlib.contextmanager
def _as_it_was(router: nn.Module, then: dict[str, torch.Tensor]) -> Iterator[None]:
    now = {name: getattr(router, name) for name in then}
    logged = [(values, values.clone()) for values in _logged_losses()]
    try:
        for name, buffer in then.items():
            setattr(router, name, buffer.clone())
        yield
    finally:
        for name, buffer in now.items():
            setattr(router, name, buffer)
        for values, before in logged:
            values.copy_(before)


def _logged_losses() -> list[torch.Tensor]:
    """`[layers]` each: what Megatron sums up until its next log line."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # before 0.18
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return [entry["values"] for entry in get_moe_layer_wise_logging_tracker().values()]
    return [entry.values for entry in get_moe_metrics_tracker().metrics.values()]
