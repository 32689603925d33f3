import logging

import pytest
import torch
from torch import nn

from ac_core.estimation.fake import fake_mode
from ac_core.estimation.kernels import Fused, fuse


def _saved(model: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        model(x).sum().backward()
    return saved


def test_norms_and_gates_of_a_decoder_are_found(decoder, caplog):
    with fake_mode():
        model = decoder()
        with caplog.at_level(logging.ERROR):
            assert fuse(model) == Fused(norms=9, gates=4)
        assert not caplog.records  # of modules that were tried and are neither
        assert model(torch.zeros(1, 8, dtype=torch.long)).logits.shape == (1, 8, 512)


def test_a_norm_keeps_its_input_and_one_number_a_row(decoder):
    with fake_mode():
        norm = decoder().norm
        fuse(norm)
        x = torch.randn(2, 5, 64, requires_grad=True)
        assert _saved(norm, x) == [(2, 5, 64), (64,), (2, 5)]
        assert (x.grad.shape, norm.weight.grad.shape) == (x.shape, (64,))


@pytest.mark.parametrize("joined", [False, True])
def test_a_gate_keeps_what_the_projections_made(decoder, joined):
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up, self.down = nn.Linear(64, 384, bias=False), nn.Linear(192, 64, bias=False)

        def forward(self, x):
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(nn.functional.silu(gate) * up)

    with fake_mode():
        mlp = Joined() if joined else decoder().layers[0].mlp
        assert fuse(mlp) == Fused(norms=0, gates=1)
        x = torch.randn(5, 64, requires_grad=True)
        saved = _saved(mlp, x)
        assert saved.count((5, 192)) == (1 if joined else 3)  # the input of down; gate and up
        assert saved.count((5, 384)) == int(joined)
        assert all(parameter.grad is not None for parameter in mlp.parameters())


def test_what_does_something_else_is_left_alone():
    class Ungated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.up(x)))

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * self.weight

    class Residual(Ungated):
        def forward(self, x):
            return x + super().forward(x)

    with fake_mode():
        model = nn.ModuleList([Ungated(), Scale(), Residual(), nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8)])
        assert fuse(model) == Fused(norms=0, gates=0)
        assert all("forward" not in vars(module) for module in model.modules())
