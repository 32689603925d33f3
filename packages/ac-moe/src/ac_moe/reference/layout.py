"""Where each row of a dispatch comes from and goes to: what a HybridEP handle says."""

from typing import NamedTuple

import torch
import torch.distributed as dist


class Sizes(NamedTuple):
    """The host's numbers of one dispatch."""

    experts: int
    """Of the whole group."""
    local_experts: int
    pad_multiple: int
    """Each expert's block has a multiple of it; 1 for no padding."""
    rows_sent: list[int]
    """By rank of the group."""
    rows_received: list[int]


class Layout(NamedTuple):
    """The places of a handle that a transfer needs."""

    sparse_to_dense: torch.Tensor
    local_map: torch.Tensor
    sizes: Sizes

    @property
    def sent(self) -> torch.Tensor:
        """int64 `[rows sent]`: the token of each, in the order (rank, token)."""
        return (self.sparse_to_dense >= 0).t().nonzero(as_tuple=True)[1]


def gather_routing(routing_map: torch.Tensor, local_experts: int, group: dist.ProcessGroup) -> Layout:
    """Tells every rank of the group which rows it gets. Two all-gathers: the numbers of tokens, and the maps.

    Args:
        routing_map: bool `[tokens, experts]`; ranks may have different numbers of tokens, also none.
    """
    tokens, experts = routing_map.shape
    ranks, rank = group.size(), group.rank()
    device = routing_map.device
    counts = torch.empty(ranks, dtype=torch.int64, device=device)
    dist.all_gather(list(counts.split(1)), torch.tensor([tokens], device=device), group=group)
    token_counts = counts.tolist()
    # Every rank sends as many rows as the longest has, because a gather of different shapes is not for every backend.
    sent = torch.zeros((max(token_counts), experts), dtype=torch.uint8, device=device)
    sent[:tokens] = routing_map
    maps = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(maps, sent, group=group)
    mine = slice(rank * local_experts, (rank + 1) * local_experts)
    local_map = torch.cat([whole[:count, mine] for whole, count in zip(maps, token_counts, strict=True)]).bool()

    to_rank = routing_map.view(tokens, ranks, local_experts).any(-1)
    sparse_to_dense = torch.where(to_rank, to_rank.long().cumsum(0) - 1, -1)
    received = torch.stack([part.any(-1).sum() for part in local_map.split(token_counts)])
    sizes = Sizes(
        experts=experts,
        local_experts=local_experts,
        pad_multiple=1,
        rows_sent=to_rank.sum(0).tolist(),
        rows_received=received.tolist(),
    )
    return Layout(sparse_to_dense, local_map, sizes)


def expert_places(dense_map: torch.Tensor, pad_multiple: int) -> torch.Tensor:
    """Rows in the order (local expert, source rank, token), each expert's block padded.

    Args:
        dense_map: bool `[rows received, local experts]`, rows in the order (source rank, token).

    Returns:
        int64 `[rows received, local experts]`: the permuted row, or -1.
    """
    blocks = padded(dense_map.sum(0), pad_multiple)
    within = dense_map.long().cumsum(0) - 1
    return torch.where(dense_map, within + (blocks.cumsum(0) - blocks), -1)


def padded(counts: torch.Tensor, multiple: int) -> torch.Tensor:
    """int64: each count rounded up to a multiple."""
    return (counts.long() + multiple - 1) // multiple * multiple
