"""A recording tells what saved each tensor, and holds none of them."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ac_core.mismatch.recording import Recording, fingerprint, nodes_holding


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x):
        x = self.inner(x).exp()
        x = Double.apply(x)
        x = checkpoint(torch.sin, x, use_reentrant=False)
        return x[x[:, 0] > 0]


def test_every_saved_tensor_with_call_node_module_and_line():
    block = Block()
    recording = Recording(block)
    with recording.everything():
        block(torch.randn(3, 4, requires_grad=True))
    told = [(saved.call.rpartition(".")[2], saved.node, saved.module) for saved in recording.saved]
    assert told[:2] == [("linear", "AddmmBackward0", "inner.0")] * 2
    assert told[2] == ("exp", "ExpBackward0", "")
    assert recording.saved[3].call == "Double.apply"
    assert told[-1] == ("__getitem__", "IndexBackward0", "")
    assert recording.saved[2].place.endswith("in forward: x = self.inner(x).exp()")
    assert recording.saved[0].place == recording.saved[2].place  # torch's own layers are not where to look
    assert [choice.op for choice in recording.choices] == ["aten::index.Tensor"]
    assert recording.choices[0].place.endswith("return x[x[:, 0] > 0]")


def test_the_line_of_a_block_of_torchs_own_layers_is_in_that_layer():
    block = nn.Sequential(nn.Linear(4, 4))
    recording = Recording(block)
    with recording.everything():
        block(torch.randn(3, 4, requires_grad=True))
    assert "linear.py" in recording.saved[0].place


def test_nothing_that_is_saved_stays_alive():
    made = []

    class Multiplies(nn.Module):
        def forward(self, x):
            y = x * 1
            made.append(weakref.ref(y))
            return y.exp() * y.sin()

    block = Multiplies()
    recording = Recording(block)
    with recording.everything():
        out = block(torch.randn(2, requires_grad=True))
    assert [saved.node for saved in recording.saved] == ["ExpBackward0", "SinBackward0", "MulBackward0", "MulBackward0"]
    assert made[0]() is None
    assert out.grad_fn is not None


def test_a_recording_beside_other_hooks_leaves_them_their_tensors():
    recording = Recording(nn.Linear(2, 2), fingerprints=True)
    x = torch.ones(3, requires_grad=True)
    with recording.hooks(lambda tensor: (tensor,), lambda packed: packed[0] * 5):
        y = x.sin().sum()
    y.backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0).cos())
    assert recording.saved[0].fingerprint == fingerprint(x)


def test_the_node_that_holds_a_tensor():
    marks = []
    with torch.autograd.graph.saved_tensors_hooks(lambda _: marks.append(object()) or marks[-1], lambda _: None):
        y = torch.ones(2, requires_grad=True).exp().sin()
    assert list(nodes_holding([y.grad_fn], marks).values()) == ["SinBackward0", "ExpBackward0"]
    assert nodes_holding([y.grad_fn], marks, limit=1) == {id(marks[1]): "SinBackward0"}
    assert nodes_holding([None], [object()]) == {}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]
)
def test_a_fingerprint_is_of_every_bit_in_its_place(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    swapped = x.clone()
    swapped[0, 0], swapped[2, 3] = x[2, 3], x[0, 0]
    assert fingerprint(x) == fingerprint(x.clone()) == fingerprint(x.t().contiguous().t())
    assert fingerprint(x) != fingerprint(swapped)
    assert fingerprint(x) != fingerprint(x + 1)


def test_a_fingerprint_of_unusual_tensors():
    assert fingerprint(torch.tensor([True, False])) != fingerprint(torch.tensor([False, True]))
    assert fingerprint(torch.tensor(float("nan"))) == fingerprint(torch.tensor(float("nan")))
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))
    assert fingerprint(torch.empty(0)) == (0, 0)
    assert fingerprint(torch.empty(3, device="meta")) is None
    assert fingerprint(torch.eye(3).to_sparse()) is None
