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
