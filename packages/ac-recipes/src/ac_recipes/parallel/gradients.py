"""The norm of gradients that lie on different meshes."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ac_recipes.training.ranks import Ranks


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None, ranks: Ranks) -> float:
    """Scale the gradients down to a total norm of `max_norm`, as `torch.nn.utils.clip_grad_norm_` does, which takes
    gradients of one mesh alone. To be called on all `ranks`, with gradients reduced.

    Every rank adds the squares of what it holds, divided by the number of ranks that hold the same, and one all-reduce
    adds them up: all ranks get the same bits, whatever the meshes.

    Returns:
        The norm before, over all parameters and ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    by_share: dict[float, list[Tensor]] = defaultdict(list)
    for gradient, part in zip(gradients, local, strict=True):
        by_share[_parts(gradient) / ranks.world_size].append(part)
    squares = sum(share * get_total_norm(parts).double().item() ** 2 for share, parts in by_share.items())
    total = math.sqrt(ranks.sum(squares))
    if max_norm is not None and total + 1e-6 > max_norm:
        for part in local:
            part.mul_(max_norm / (total + 1e-6))
    return total


def _parts(gradient: Tensor) -> int:
    """Into how many different parts ranks have split a gradient: 1 where all hold it whole."""
    if not isinstance(gradient, DTensor):
        return 1
    placements = enumerate(gradient.placements)
    return math.prod(gradient.device_mesh.size(dim) for dim, placement in placements if not placement.is_replicate())
