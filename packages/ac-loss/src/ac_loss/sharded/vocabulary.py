"""A vocabulary spread over ranks that hold the same tokens: what they tell one another.

NOTE [ Two all-reduces a chunk ]
Each rank has the logits of its own rows of the weight. A row's loss needs of the others its largest logit, then the sum
of the exponentials, the label's logit (which one rank has) and, for label smoothing, the sum of the logits: one
all-reduce for the first, one for the rest together. Everything after that is local: each rank has the gradient of its
own logits and of its own rows of the weight, and an addend of the gradient of hidden.
A recomputing loss has the statistics of all its rows before it asks, so there it is two for a call, and the backward
has them already.
1. So every rank makes the same chunks, whatever the size of its shard: they are sized by the widest one.
2. Labels that differ between the ranks would give a plausible wrong loss, or a hang, and so would a gradient of hidden
   that not all of them want. They are compared, once a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabShard:
    """The part of the vocabulary whose logits this rank has.

    Attributes:
        group: the ranks that share the vocabulary.
        start: its first token.
        width: how many tokens, at least one.
        size: tokens of the whole vocabulary.
        widest: tokens of the largest part.
    """

    group: dist.ProcessGroup
    start: int
    width: int
    size: int
    widest: int

    def locate(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of ``labels`` ``[rows]`` and which of them are elsewhere, both ``[rows, 1]``; those get column 0."""
        index = labels.unsqueeze(1) - self.start
        elsewhere = (index < 0) | (index >= self.width)
        return index.masked_fill_(elsewhere, 0), elsewhere

    def max_(self, top: torch.Tensor) -> None:
        """Each row's maximum over the ranks, in place."""
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)

    def sum_(self, *parts: torch.Tensor | None) -> None:
        """Sums over the ranks of ``[rows, 1]`` each, in place and by one collective."""
        given = [part for part in parts if part is not None]
        packed = torch.stack(given)
        dist.all_reduce(packed, group=self.group)
        for part, total in zip(given, packed.unbind(), strict=True):
            part.copy_(total)


def meet(
    group: dist.ProcessGroup, ranks: Sequence[int], width: int, labels: torch.Tensor, *, wanted: bool
) -> VocabShard:
    """This rank's part, from the widths of all; by one small collective.

    Args:
        group: the ranks that share the vocabulary.
        ranks: theirs, in order of their rows.
        width: tokens of this rank's part.
        labels: of this rank, any shape, integers; only compared.
        wanted: whether this rank wants the gradient of hidden.

    Raises:
        ValueError: the ranks have different labels, or one of them no row of the vocabulary, or only some of them want
            the gradient of hidden. On every rank.
    """
    flat = labels.reshape(-1).to(torch.int64)
    odd = torch.arange(flat.numel(), device=flat.device).mul_(2).add_(1)
    facts = [flat.new_tensor(fact) for fact in (width, int(wanted), flat.numel())]
    mine = torch.stack([*facts, (flat * odd).sum(), flat.sum()])
    gathered = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(gathered, mine, group=group)
    by_place = torch.stack(gathered).tolist()
    told = [by_place[dist.get_group_rank(group, rank)] for rank in ranks]
    for rank, (theirs, wants, *tokens) in zip(ranks, told, strict=True):
        if tokens != told[0][2:]:
            raise ValueError(
                f"labels: rank {rank} has other labels than rank {ranks[0]} ({tokens[0]} and {told[0][2]} of them), "
                "and both are in the vocabulary-parallel group, whose ranks must hold the same tokens; give them the "
                "same batch (split the data over the data-parallel ranks only), or pass the group as "
                "grad_reduce_group if the weight is sharded by FSDP"
            )
        if wants != told[0][1]:
            with_, without = (rank, ranks[0]) if wants else (ranks[0], rank)
            raise ValueError(
                f"hidden: its gradient is wanted on rank {with_} and not on rank {without}, and it is summed over the "
                "ranks of the vocabulary-parallel group; call the loss on all of them with a hidden that requires "
                "grad, or on none (torch.no_grad() counts)"
            )
        if theirs == 0:
            raise ValueError(
                f"weight: rank {rank} of the vocabulary-parallel group has no row of the vocabulary; use fewer "
                f"tensor-parallel ranks than {len(ranks)}"
            )
    widths = [theirs for theirs, *_ in told]
    start = sum(widths[: ranks.index(dist.get_rank())])
    return VocabShard(group=group, start=start, width=width, size=sum(widths), widest=max(widths))


def summed_gradient(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``hidden`` as it is; its gradient, of which each rank has an addend, is summed over the ranks."""
    return _SummedGradient.apply(hidden, group)


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
