"""Bytes by storage and FLOPs by purpose, on real, meta, fake and wrapped tensors."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ac_core.proof.meters import Flops, LiveBytes, is_fake

KB = 1024


def floats(kilobytes):
    return torch.zeros(kilobytes * KB // 4)


@pytest.fixture
def fake_group():
    """A process group of two that exchanges nothing."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_storage_counts_once_while_it_lives():
    with LiveBytes() as live:
        a = floats(4)
        views = [a[:10], a.reshape(2, -1), a.detach()]
        assert live.current == 4 * KB
        b = a + 1
        assert live.current == live.peak == 8 * KB
        del a
        assert live.current == 8 * KB  # its views hold it
        del views
        assert (live.current, live.peak) == (4 * KB, 8 * KB)
    del b
    assert live.current == 0  # freed after the meter was left


def test_what_was_there_before_does_not_count():
    old = floats(4)
    with LiveBytes() as live:
        old.add_(1)
        view = old.view(2, -1).t()
        new = old.clone()
    assert list(live.alive().values()) == [4 * KB]
    assert live.numbers([new]) == set(live.alive())
    assert live.numbers([view]).isdisjoint(live.alive())
    del old, view
    assert live.current == 4 * KB


def test_constants_made_from_python_numbers_count():
    with LiveBytes() as live:
        constant = torch.tensor([1.0, 2.0])
    assert live.current == constant.nbytes


def test_resizes_count_of_new_and_of_old_storages():
    old, new_size = floats(4), 16 * KB
    with LiveBytes() as live:
        new = floats(4)
        new.untyped_storage().resize_(0)
        assert live.current == 0
        new.untyped_storage().resize_(new_size)
        assert live.current == new_size
        old.untyped_storage().resize_(0)
        assert live.current == new_size - 4 * KB  # less than there was
        old.untyped_storage().resize_(8 * KB)
        assert live.current == new_size + 4 * KB
        new.resize_(8 * KB)  # 32 KB, by an operation this time
        assert live.current == 36 * KB
        del old
        assert live.current == 32 * KB


def test_watching_resizes_ends_with_the_meter():
    before = torch.UntypedStorage.resize_
    with LiveBytes() as outer:
        with pytest.raises(RuntimeError, match="inside"), LiveBytes():
            raise RuntimeError("inside")
        floats(1).untyped_storage().resize_(2 * KB)
        assert outer.peak == 2 * KB
    assert torch.UntypedStorage.resize_ is before
    assert "resize_" not in vars(torch.UntypedStorage)


def test_meta_and_fake_tensors_count_as_real_ones_do():
    def peak(device):
        with LiveBytes() as live:
            x = torch.randn(32, 64, device=device, requires_grad=True)
            (x.sin() @ x.t()).sum().backward()
        return live.peak, live.current

    real = peak("cpu")
    assert peak("meta") == real
    with FakeTensorMode():
        assert peak("cpu") == real
        assert is_fake(torch.empty(2))
    assert is_fake(torch.empty(2, device="meta"))
    assert not is_fake(torch.empty(2))


def test_a_sparse_gradient_counts_by_its_parts():
    table = nn.Embedding(1000, 16, sparse=True)
    with LiveBytes() as live:
        loss = table(torch.tensor([3, 5])).sum()
        loss.backward()
        del loss
    gc.collect()
    assert live.current == 2 * 8 + 2 * 16 * 4


def test_a_dtensor_counts_by_its_local_part_and_its_trials_do_not_count(fake_group):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    weight = distribute_tensor(torch.randn(64, 32), fake_group, [Shard(0)])
    x = distribute_tensor(torch.randn(8, 32), fake_group, [Replicate()])
    with LiveBytes() as live, Flops() as flops:
        y = nn.functional.linear(x, weight)
    assert y.shape == (8, 64)
    assert live.current == 8 * 32 * 4
    assert flops.forward == 2 * 8 * 32 * 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


X = torch.ones(5, 8)
UP = DOWN = 2 * 5 * 8 * 16


def flops_of(function, x=X):
    with Flops() as flops:
        loss = function(x).sum()
        flops.in_backward = True
        loss.backward()
    return flops.forward, flops.backward, flops.recompute


def input_that_needs_a_gradient():
    return X.clone().requires_grad_()


def test_totals_are_those_of_torchs_counter():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6, 8), Block())
    x = torch.ones(5, 3, 8)
    with FlopCounterMode(display=False) as torchs:
        model(x).sum().backward()
    forward, backward, recompute = flops_of(model, x)
    assert forward + backward == torchs.get_total_flops()
    assert recompute == 0
    assert forward == 2 * 5 * 4 * 6 * 3 * 3 + 2 * 5 * 24 * 8 + UP + DOWN


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use_reentrant": False}, UP),  # it ends with what the down projection saves, its input
        ({"use_reentrant": False, "early_stop": False}, UP + DOWN),
        ({"use_reentrant": True}, UP + DOWN),
    ],
    ids=["early stop", "no early stop", "reentrant"],
)
def test_a_recompute_is_told_from_the_backward(options, expected):
    block = Block()
    plain = flops_of(block, input_that_needs_a_gradient())
    assert plain == (UP + DOWN, 2 * (UP + DOWN), 0)
    assert flops_of(lambda x: checkpoint(block, x, **options), input_that_needs_a_gradient()) == (*plain[:2], expected)


def test_nested_checkpoints_recompute_the_inner_one_twice():
    block = Block()

    def outer(x):
        return checkpoint(block, x, use_reentrant=False).sin()

    _, backward, recompute = flops_of(
        lambda x: checkpoint(outer, x, use_reentrant=False), input_that_needs_a_gradient()
    )
    assert (backward, recompute) == (2 * (UP + DOWN), UP + DOWN + UP)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_block_runs_without_gradients_is_recomputed_as_well(use_reentrant):
    class Gated(Block):
        def forward(self, x):
            with torch.no_grad():  # before, between and after what needs a gradient
                first = self.up(x)
            y = self.down(first + self.up(x))
            with torch.no_grad():
                scale = self.up(x).mean()
            return y * scale

    gated = Gated()
    expected = flops_of(gated, input_that_needs_a_gradient())
    got = flops_of(lambda x: checkpoint(gated, x, use_reentrant=use_reentrant), input_that_needs_a_gradient())
    assert got == (*expected[:2], 3 * UP + DOWN)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_recompute_for_a_gradient_that_the_forward_takes(create_graph):
    """As interatomic potentials do: the output is the gradient of an energy."""
    block = Block()

    def force(x, run):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(run(x).sum(), x, create_graph=create_graph)
        return gradient if create_graph else gradient.detach() * block.up.weight.sum()

    plain = flops_of(lambda x: force(x, block))
    forward, _, recompute = flops_of(lambda x: force(x, lambda x: checkpoint(block, x, use_reentrant=False)))
    assert forward == plain[0]
    assert recompute == UP * (2 if create_graph else 1)  # with a graph, the backward needs the region once more


def test_a_tool_with_an_autograd_function_of_its_own():
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, block):
            ctx.block = block
            ctx.save_for_backward(x)
            with torch.no_grad():
                return block(x)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.block(x)
            y.backward(gradient)
            return x.grad, None

    block = Block()
    got = flops_of(lambda x: Again.apply(x, block), input_that_needs_a_gradient())
    assert got == (UP + DOWN, 2 * (UP + DOWN), UP + DOWN)


def test_attention_counts_on_the_cpu():
    q = torch.randn(2, 3, 7, 4, requires_grad=True)
    forward, backward, _ = flops_of(lambda q: nn.functional.scaled_dot_product_attention(q, q, q), q)
    matmul = 2 * (2 * 3) * 7 * 7 * 4
    assert (forward, backward) == (2 * matmul, 5 * matmul)  # of the five, one computes the scores again


def test_grouped_matrix_multiplications_count():
    a = torch.randn(6, 16, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(2, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    grouped = getattr(nn.functional, "grouped_mm", None) or torch._grouped_mm
    forward, backward, _ = flops_of(lambda a: grouped(a, b, offs=offsets).square(), a)
    assert (forward, backward) == (2 * 6 * 16 * 8, 2 * 2 * 6 * 16 * 8)


def test_operations_that_come_in_one_piece_are_counted_by_their_parts():
    block = Block()
    with Flops() as flops, torch.inference_mode():
        block(X)
    assert flops.forward == UP + DOWN
