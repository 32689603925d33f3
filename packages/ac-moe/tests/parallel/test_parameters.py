import torch
from ac_moe_hf import mesh
from ac_moe_ranks import Ranks
from torch import nn
from torch.distributed.tensor import Shard

from ac_moe.parallel.parameters import local_tensor, shard


def sharded(rank: int) -> None:
    whole = nn.Parameter(torch.arange(24.0).reshape(4, 2, 3), requires_grad=rank == 0)
    part = shard(whole, mesh(2), range(2 * rank, 2 * rank + 2))
    assert isinstance(part, nn.Parameter)
    assert part.requires_grad == whole.requires_grad
    assert part.shape == whole.shape
    assert part.placements == (Shard(0),)
    assert torch.equal(part.full_tensor(), whole)
    assert part.to_local().untyped_storage().nbytes() * 2 == whole.untyped_storage().nbytes()


def test_shard_holds_one_part_in_the_shape_of_all(ranks: Ranks) -> None:
    ranks.run(sharded)


def divided(rank: int) -> list[float]:
    part = shard(nn.Parameter(torch.ones(4, 2)), mesh(2), range(2 * rank, 2 * rank + 2))
    found = []
    for divisor in (1, 4):
        part.grad = None
        for _ in range(2):
            (local_tensor(part, divisor) * 6).sum().backward()
        assert part.grad.placements == (Shard(0),)
        found.append(part.grad.to_local().unique().item())
    return found


def test_gradient_is_divided_before_it_is_accumulated(ranks: Ranks) -> None:
    assert ranks.run(divided) == [[12.0, 3.0]] * 2
