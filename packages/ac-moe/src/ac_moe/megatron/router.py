"""Megatron's router in a checkpointed region: it routes as it did in the forward, and counts once."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ac_moe.cache.region import Site, claim
from ac_moe.megatron.replacement import Replacement
from ac_moe.routing import check, counted_once, pin

# NOTE [ A router counts in the forward ]
#
# If gradients are on, Megatron's router adds to buffers (expert load, global auxiliary loss) and to sums that are
# logged (auxiliary losses). So a non-reentrant checkpoint counts twice, and a reentrant one counts in the recompute, in
# the order in which backwards come. The global auxiliary loss reads what it adds to: gradients would depend on that.
#
# 1. In the forward of a region the router always counts. Where a reentrant checkpoint has turned gradients off, they
#    are on for the router, and its outputs leave without the graph.
# 2. In the recompute the router finds its buffers as they were in that forward, and what it adds is dropped.
# 3. Logs are sums over all layers and microbatches, which nothing reads in between: they are put back.
_LOGS = "logged losses"


class RouterForward(Replacement):
    """`router.forward`; see NOTE [ A router counts in the forward ]."""

    def __init__(self, router: nn.Module, site: Site) -> None:
        super().__init__(router, "forward")
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        claimed = claim(self.site, _LOGS)
        with counted_once(self.owner):
            if claimed.kept is not None:
                claimed.pass_on()
                with _logs_unchanged():
                    return self.original(*args, **kwargs)
            claimed.keep(True)
            if torch.is_grad_enabled() or not claimed.keepers:
                return self.original(*args, **kwargs)
            with torch.enable_grad():
                outputs = self.original(*args, **kwargs)
            return tuple(output.detach() for output in outputs)


class Routing(Replacement):
    """`router.routing`, which makes probabilities and a map of logits: of those of the forward, in each recompute.

    Args:
        dispatcher: of the same layer, whose group must route alike.
        check_routing: whether to compare the maps; None for those that are not made by Megatron's own code.
    """

    def __init__(self, router: nn.Module, site: Site, dispatcher: Any, check_routing: bool | None) -> None:
        super().__init__(router, "routing")
        self.site = site
        self.dispatcher = dispatcher
        self.check_routing = check_routing

    def __call__(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = self.original(pin(self.site, logits), *args, **kwargs)
        if self._checks:
            routing_map = outputs[1]
            check(self.site, routing_map.bool(), routing_map.shape[-1], self.dispatcher.tp_ep_group)
        return outputs

    @property
    def _checks(self) -> bool:
        if self.check_routing is not None:
            return self.check_routing
        made_by = type(self.owner).routing.__module__
        return self.previous is not None or not made_by.startswith("megatron.core.")


@contextlib.contextmanager
def _logs_unchanged() -> Iterator[None]:
    logged = [(values, values.clone()) for values in _logged_losses()]
    try:
        yield
    finally:
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
