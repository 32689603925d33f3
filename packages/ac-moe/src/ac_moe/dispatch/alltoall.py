"""Expert parallelism over plain `torch.distributed`, on any device and backend that has all-to-all."""

import torch

from ac_moe.cache.modes import without_dispatch_modes
from ac_moe.cache.region import claim
from ac_moe.dispatch.alltoall_exchange import AllToAllExchange, plan
from ac_moe.dispatch.base import Dispatcher
from ac_moe.errors import RecomputeRoutingMismatchError
from ac_moe.routing.check import ROUTING


class AllToAllDispatcher(Dispatcher):
    """Sends each token to the ranks of its experts and sums what they return. One per MoE layer.

    The contract is that of DeepEP's HybridEP: router weights travel with the rows and the experts apply them, best
    inside the activation, so that `combine` is a plain sum and saves nothing for backward. Under
    `ac_moe.context_fn("combine")` the recompute of a checkpointed block does not repeat `combine`.

    Each layer runs three collectives to dispatch (counts, rows, weights) and one to combine. With the counts each rank
    tells the others a checksum of its expert ids: that is what a recompute compares with the forward, without a
    collective of its own, and an expert id out of range is an error on every rank.

    Rows are ordered by (local expert, source rank, token). All ranks of the group must call `dispatch` and `combine`
    alike, with as many tokens as each has, also none; and the result of `combine` must depend on `rows` on every rank,
    also on one that received no row, because the backward communicates too.

    It holds no tensor and no state of a call. With the default group it can be pickled; it can always be deep-copied,
    and the copy uses the same group.

    Args:
        num_experts: of the whole group, a multiple of its size. Expert `e` lives on rank `e // (num_experts / size)`.
        group: the expert-parallel process group; None takes the default group of the moment of each call.
        name: how errors call this layer, such as its module path; a number if it has none.

    Raises:
        ValueError: `num_experts` is not a positive integer.
    """

    def _plan(self, tokens: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> AllToAllExchange:  # noqa: ARG002 - the routing is all it needs
        claimed = claim(self._site, ROUTING)
        with torch.no_grad(), without_dispatch_modes():
            exchange = plan(expert_ids, self.num_experts, self.group)
        now = exchange.fingerprint
        if claimed.kept is None:
            claimed.keep(now)
            return exchange
        forward = claimed.kept.value
        if forward != now:
            pairs = enumerate(zip(forward.checksums, now.checksums, strict=True))
            ranks = tuple(rank for rank, (before, after) in pairs if before != after)
            raise RecomputeRoutingMismatchError.of(self._site, forward, now, ranks)
        claimed.pass_on()
        return exchange
