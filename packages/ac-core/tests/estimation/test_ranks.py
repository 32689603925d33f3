from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from ac_core import estimate
from ac_core.estimation.ranks import simulated_ranks


def test_a_group_for_as_long_as_it_is_needed():
    assert not dist.is_initialized()
    with simulated_ranks(8) as mesh:
        assert mesh.size() == 8
        assert mesh.get_local_rank() == 0
    assert not dist.is_initialized()


def test_a_group_that_is_there_stays_what_it_was(decoder):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        world = dist.group.WORLD
        settings = {"batch_size": 1, "sequence_length": 8, "strategy": "fsdp2", "dp_size": 8}
        beside = estimate(decoder, **settings)
        with simulated_ranks(4) as four, simulated_ranks(2) as two:
            assert (four.size(), two.size()) == (4, 2)
        assert dist.group.WORLD is world
        assert dist.get_world_size() == 1
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()
    assert beside.to_dict() == estimate(decoder, **settings).to_dict()


@pytest.mark.parametrize("initialised", [False, True])
def test_a_grid_of_ranks(initialised):
    with simulated_ranks(8) if initialised else nullcontext(), simulated_ranks(2, 4, names=("copies", "ep")) as grid:
        assert grid.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert grid.mesh_dim_names == ("copies", "ep")
        assert [grid[name].mesh.tolist() for name in ("copies", "ep")] == [[0, 4], [0, 1, 2, 3]]
        assert dist.get_world_size(grid["ep"].get_group()) == 4
        assert grid["copies"].get_local_rank() == grid["ep"].get_local_rank() == 0
    assert not dist.is_initialized()
