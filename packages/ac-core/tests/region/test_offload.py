"""Inputs of checkpointed blocks in host memory: the same numbers, fewer bytes, and back for every recompute."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ac_core
from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError, apply_activation_checkpointing

BOUNDARY = 24 * 16 * 4
"""Bytes of the tensor between two blocks of `stack`, for the ids of `train_step`."""
IDS = torch.arange(24).reshape(2, 12) % 32


def offloading(policy="full", **options):
    return ActivationCheckpointingConfig(policy=policy, offload="cpu", **options)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_numbers_are_those_of_no_checkpointing(stack, policy, dropout):
    assert ac_core.verify(stack(dropout=dropout), IDS, offloading(policy)).equal


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_every_boundary_is_on_the_host_and_no_longer_on_the_device(stack, policy):
    model = stack(depth=4)
    apply_activation_checkpointing(model, policy)
    here = ac_core.measure(model, IDS)
    ac_core.remove_activation_checkpointing(model)
    report = apply_activation_checkpointing(model, offloading(policy))
    moved = ac_core.measure(model, IDS)
    assert here.host_bytes == 0
    assert moved.host_bytes == 4 * BOUNDARY
    assert here.saved_bytes - moved.saved_bytes == 4 * BOUNDARY
    assert moved.recompute_flops == here.recompute_flops
    assert "inputs of 4 blocks kept in host memory" in str(report)


def test_two_backwards_over_a_retained_graph(stack):
    model, plain = stack(dropout=0.3), stack(dropout=0.3)
    apply_activation_checkpointing(model, offloading())
    for m in (model, plain):
        torch.manual_seed(3)
        loss = m(IDS).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_two_graphs_alive_and_one_dropped(stack):
    model, plain = stack(), stack()
    apply_activation_checkpointing(model, offloading())
    for m in (model, plain):
        first, second, _ = (m(IDS + shift).square().mean() for shift in (0, 1, 2))
        first.backward()
        second.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_nothing_is_left_after_a_step_without_the_garbage_collector(stack):
    from ac_core.proof.meters import LiveBytes

    model = stack()
    apply_activation_checkpointing(model, offloading())
    gc.disable()
    try:
        with LiveBytes() as live:
            loss = model(IDS).square().mean()
            assert live.host == 4 * BOUNDARY
            loss.backward()
            del loss
            model.zero_grad(set_to_none=True)
            model(IDS).square().mean()  # dropped without a backward
            assert live.host == 0
            assert live.current <= 0
    finally:
        gc.enable()


def test_inside_of_an_outer_checkpoint(stack, assert_same_step):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = stack()

        def forward(self, ids):
            return checkpoint(self.inner, ids, use_reentrant=False)

    model, plain = Outer(), Outer()
    apply_activation_checkpointing(model, offloading())
    assert_same_step(plain, model)


def test_a_copy_and_an_unpickled_model_offload_by_themselves(stack, assert_same_step):
    model = stack()
    apply_activation_checkpointing(model, offloading())
    model(IDS)  # something is in flight
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert ac_core.measure(other, IDS).host_bytes == 4 * BOUNDARY
        assert_same_step(stack(), other)


class Views(nn.Module):
    """Blocks that are given a slice, an expanded tensor and a mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x, mask = self.embed(ids), torch.ones(ids.shape[1], 1)
        row = x[:, :1].expand_as(x)
        for layer in self.layers:
            x = layer(x.transpose(0, 1)[1:].transpose(0, 1) if layer is self.layers[1] else x, row, mask=mask)
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, row, *, mask):
        n = x.shape[1]
        return x + self.down((self.up(x) + self.up(row[:, :n]) * mask[:n]).tanh())


def test_views_keep_their_strides_and_what_is_shared_stays():
    seen = []
    model = Views()
    apply_activation_checkpointing(model, offloading())
    model.layers[1].up.register_forward_pre_hook(lambda _, args: seen.append((args[0].stride(), args[0].shape)))
    assert ac_core.verify(Views(), IDS, offloading()).equal
    model(IDS).sum().backward()
    assert seen[:2] == seen[2:]
    assert ac_core.measure(model, IDS).host_bytes == BOUNDARY + (12 + 11) * 16 * 4


def test_an_input_that_the_block_changes_is_refused(stack):
    model = stack(depth=2)
    model.layers[1].norm.register_forward_pre_hook(lambda _, args: args[0].mul_(2).shape and None)
    apply_activation_checkpointing(model, offloading())
    with pytest.raises(ActivationCheckpointingError, match=r"block 'layers\.1' changes its input in place"):
        model(IDS)


def test_an_input_that_stays_and_is_changed_before_the_backward_is_refused():
    model, scale = Block(), torch.ones(12, 1)
    holder = nn.Sequential(model)
    apply_activation_checkpointing(holder, offloading(), blocks=Block)
    x = torch.randn(2, 12, 16, requires_grad=True)
    loss = model(x, x, mask=scale).sum()
    scale.mul_(2)
    with pytest.raises(ActivationCheckpointingError, match=r"an input of shape \(12, 1\).*modified in place"):
        loss.backward()


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_the_compiler_is_refused(stack, policy):
    torch._dynamo.reset()
    model = stack(depth=2)
    apply_activation_checkpointing(model, offloading(policy))
    model.compile(backend="aot_eager")
    with pytest.raises(ActivationCheckpointingError, match="is compiled.*offload 'cpu' would do nothing"):
        model(IDS)
