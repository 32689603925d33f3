"""A recompute with other parameters than the forward's is an error; with FSDP's own exchange it is not."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingError, apply_activation_checkpointing

# `test_apply.py` has the parameter that was edited in place, and `functional_call`.


def test_a_parameter_that_is_replaced_is_an_error(stack):
    model = stack()
    apply_activation_checkpointing(model)
    loss = model(torch.arange(6)).sum()
    model.layers[1].up.weight = nn.Parameter(model.layers[1].up.weight.detach().clone())
    with pytest.raises(ActivationCheckpointingError, match=r"'up\.weight' of block 'layers\.1' is another tensor"):
        loss.backward()


@pytest.mark.parametrize("where", ["up", "dropout"], ids=["beside others", "where there was none"])
def test_a_parameter_that_is_added_is_an_error(stack, where):
    model = stack()
    apply_activation_checkpointing(model)
    loss = model(torch.arange(6)).sum()
    getattr(model.layers[1], where).register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(ActivationCheckpointingError, match=r"block 'layers\.1' has gained or lost a parameter"):
        loss.backward()


def test_the_optimizer_between_two_steps_is_none(stack, assert_same_step):
    model, plain = stack(), stack()
    apply_activation_checkpointing(model)
    for m in (model, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            m(torch.arange(6)).square().mean().backward()
            optimizer.step()
    assert_same_step(model, plain)


@pytest.mark.parametrize("reshard", [True, False])
def test_units_of_fully_shard_inside_a_block(reshard):
    """An inner unit holds its sharded parameters when the block begins and the gathered ones when it is recomputed."""
    script = f"""
        import os, torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        from ac_core import apply_activation_checkpointing

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 8))
                self.calls = 0

            def forward(self, x):
                self.calls += 1
                return x + self.inner(x * self.calls)

        def run(checkpointed):
            torch.manual_seed(0)
            model = nn.Sequential(Block(), Block())
            for block in model:
                fully_shard(block.inner, reshard_after_forward={reshard})
                fully_shard(block, reshard_after_forward={reshard})
            if checkpointed:
                apply_activation_checkpointing(model)
            for step in range(2):
                model(torch.full((3, 8), 0.1)).square().mean().backward()
            return [p.grad.to_local() for p in model.parameters()], [block.calls for block in model]

        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        (plain, calls), (got, counted) = run(False), run(True)
        print(all(map(torch.equal, plain, got)) and counted == calls, flush=True)
        os._exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "True\n", done.stderr
