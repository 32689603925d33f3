"""Whether every rank routes in the recompute as it did in the forward."""

import dataclasses

import torch
import torch.distributed as dist

from ac_moe.cache.modes import without_dispatch_modes
from ac_moe.cache.region import Site, claim
from ac_moe.errors import RecomputeRoutingMismatchError
from ac_moe.routing.fingerprint import routing_numbers
from ac_moe.routing.pins import is_pinned

ROUTING = "dispatch"
"""Kind of the fingerprints that a region keeps, by which an error calls one too many."""


@dataclasses.dataclass(frozen=True)
class Routing:
    """Where the tokens of one rank went, in plain numbers."""

    tokens: int
    rows_per_expert: tuple[int, ...]
    """To each expert of the group."""
    checksum: int
    """Of which token goes where: equal counts with other tokens differ here. 0 if it was not asked for."""

    @classmethod
    def read(cls, numbers: torch.Tensor) -> "Routing":
        tokens, checksum, *rows = numbers.tolist()
        return cls(tokens, tuple(rows), checksum)

    def write(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self.tokens, self.checksum, *self.rows_per_expert], device=device)

    def __str__(self) -> str:
        digest = f", checksum {self.checksum & 0xFFFFFFFF:08x}" if self.checksum else ""
        return f"{self.tokens} tokens, rows per expert {list(self.rows_per_expert)}{digest}"


def check(
    site: Site, routing: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None, *, checksum: bool = True
) -> None:
    """In a recompute, makes sure that the whole group routes as in the forward, before anything is sent.

    To be called by every rank where it dispatches, in both phases. Outside of an ac-moe context, and where `routing` is
    what `pin` has just served, it does nothing. It costs one wait for the device in the forward; in the recompute an
    all-reduce of one number, which is the cheapest way for ranks that do route alike to learn that one does not, and
    one wait. Only a mismatch costs more: an all-gather, to name the ranks.

    Args:
        site: the layer.
        routing: integer `[tokens, top_k]` expert ids, or a bool `[tokens, experts]` map.
        num_experts: of the whole group.
        group: the expert-parallel group, None for the default one.
        checksum: compare which token goes where, not only how many tokens each expert gets.

    Raises:
        RecomputeRoutingMismatchError: on every rank, if any rank routes otherwise.
        RecomputeCacheError: the recompute dispatches more often than the forward did.
    """
    claimed = claim(site, ROUTING)
    if claimed.kept is None and not claimed.keepers:
        return
    with torch.no_grad(), without_dispatch_modes():
        if claimed.kept is None:
            claimed.keep(Routing.read(routing_numbers(routing, num_experts, checksum=checksum)))
            return
        claimed.pass_on()
        if is_pinned(routing):
            return
        now = routing_numbers(routing, num_experts, checksum=checksum)
        forward = claimed.kept.value.write(now.device)
        differs = (forward != now).any().int()
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=group)
        if differs.item():
            raise _mismatch(site, torch.stack([forward, now]), group)


def _mismatch(site: Site, both: torch.Tensor, group: dist.ProcessGroup | None) -> RecomputeRoutingMismatchError:
    """Args: both: int64 `[2, numbers]` of this rank, forward and recompute."""
    everyones = [torch.empty_like(both) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, both, group=group)
    told = [(Routing.read(forward), Routing.read(now)) for forward, now in everyones]
    ranks = tuple(rank for rank, (forward, now) in enumerate(told) if forward != now)
    return RecomputeRoutingMismatchError.of(site, *told[ranks[0]], ranks)
