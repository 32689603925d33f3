"""The combine step of an MoE layer: one autograd node, whose value is computed once per checkpointed block."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from ac_moe.cache.conditions import refuse_rows
from ac_moe.cache.engine import graph_is_kept
from ac_moe.cache.modes import without_dispatch_modes
from ac_moe.cache.region import COMBINE, Claim, Site, claim
from ac_moe.cache.routing_check import check_routing
from ac_moe.cache.stats import recorder
from ac_moe.cache.tail import opened
from ac_moe.errors import RecomputeCacheError

# NOTE [ One node in both phases ]
#
# Checkpoint matches the tensors that the recompute packs with those of the forward by their order alone.
#
# 1. The forward and the recompute build the same autograd node, `_Combine`, whether its value is computed or served.
#    Without reentry the forward's node runs in the backward and the recompute's is thrown away; with reentry it is the
#    other way round. Neither can tell, so both must be right.
# 2. The node saves no tensor. A combine that saved one would force the recompute to reach it, and early stop, which
#    ends a recompute after the last tensor that is needed, could never skip it (NVIDIA-NeMo/Automodel#2930).
# 3. So backward may use the routing alone, which the node holds as a plain attribute. It can, because combine is an
#    unweighted sum: its backward is the dispatch of the gradient. Router weights are applied by the experts.
# 4. The node holds the exchange and not what it was applied to: nothing here keeps an activation alive. It lets go of
#    it when its backward has run, as of a saved tensor, since the loss may be held for long.


class Exchange(Protocol):
    """The routing of one call of one layer: how rows travel between the ranks of tokens and the ranks of experts."""

    collectives: int
    """Collectives that `combine` runs."""

    @property
    def fingerprint(self) -> object:
        """What was routed, comparable by `==`, readable by `str`, without device memory."""

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` of the experts to `[tokens, hidden]`: for each token the sum of its rows."""

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` to `[rows, hidden]`: the adjoint of `combine`."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What the value of a combine depends on, apart from the numbers in its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    routing: object

    def __str__(self) -> str:
        return f"rows {list(self.shape)} {self.dtype}, {self.routing}"


@torch.compiler.disable(reason="ac-moe's recompute cache keeps tensors by layer and call, which a graph cannot")
def combine(rows: torch.Tensor, exchange: Exchange, site: Site) -> torch.Tensor:
    """Sums the experts' rows for each token, or returns what the forward of the checkpointed block kept.

    Args:
        rows: `[rows, hidden]`, any floating dtype, in the order of `exchange`.
        exchange: the routing of this call.
        site: the layer.

    Returns:
        `[tokens, hidden]`, dtype of `rows`.

    Raises:
        MoETailError: under `moe_tail`, `rows` is not what `ac_moe.experts.down_projection` returned.
        RecomputeRoutingMismatchError: what was kept was routed otherwise.
        RecomputeCacheError: what was kept was changed in place, or the recompute calls the layer too often.
    """
    with opened(rows) as mark:
        claimed = claim(site, COMBINE)
        for region, _ in claimed.keepers:
            if region.mode == "moe_tail":
                if mark is None:
                    refuse_rows(site)
                region.combined.add(mark.number)
        if mark is not None and mark.skipped and claimed.kept is None:
            raise RecomputeCacheError(
                f"{site}: moe_tail: the recompute did not make the rows that are given to combine, and combine, which "
                "is in a checkpoint of its own, has nothing kept to return instead. Put the down projection and "
                "combine into one checkpoint, or use one mode for both."
            )
        fingerprint = Fingerprint(tuple(rows.shape), rows.dtype, exchange.fingerprint)
        if claimed.kept is not None:
            if claimed.kept.edited:
                raise RecomputeCacheError(
                    f"{site}: the combine output that was kept for the recompute was changed in place after the "
                    "forward made it, so the recompute would continue from the changed values. Use an out-of-place "
                    "operation on the output of the MoE layer (`y = y + x` for `y += x`), or checkpoint this block "
                    "with mode 'none'."
                )
            check_routing(site, claimed.kept.fingerprint, fingerprint)
        return _Combine.apply(rows, exchange, _Value(claimed, fingerprint, mark is not None and mark.skipped))


class _Value(NamedTuple):
    """Where the value of one combine comes from and goes to."""

    claimed: Claim
    fingerprint: Fingerprint
    without_projection: bool

    def of(self, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        kept = self.claimed.kept
        if kept is None:
            output = exchange.combine(rows)
            self.claimed.keep(output, self.fingerprint)
            return output
        recorder.served(kept.ledger, exchange.collectives, gemms=int(self.without_projection))
        self.claimed.pass_on()
        return kept.value.detach()


class _Combine(torch.autograd.Function):
    """See NOTE [ One node in both phases ]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange, value: _Value) -> torch.Tensor:
        ctx.exchange = exchange
        with without_dispatch_modes():
            return value.of(rows, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return exchange_of(ctx).dispatch(grad), None, None


def exchange_of(ctx: Any) -> Exchange:
    """The exchange of the node whose backward is running. Released with the graph, as saved tensors are.

    Raises:
        RuntimeError: it was released by an earlier backward.
    """
    exchange = ctx.exchange
    if exchange is None:
        raise RuntimeError(
            "Trying to backward through an MoE layer a second time, after its routing was freed. Specify "
            "retain_graph=True in the first backward."
        )
    if not graph_is_kept():
        ctx.exchange = None
    return exchange
