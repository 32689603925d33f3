import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ac_core


class Functional(nn.Module):
    """A block without a submodule for its products."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, 16) / 4), nn.Parameter(torch.randn(16, 32) / 4)

    def forward(self, x):
        return x + F.linear(F.linear(x, self.up).relu(), self.down)


class Whole(nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(32, 16), nn.ModuleList(make() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def encoder_layer(dropout=0.1):
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)


@pytest.mark.parametrize("save", [None, ("matmul",), ("attention",)], ids=str)
@pytest.mark.parametrize("make", [Functional, encoder_layer])
def test_functions_called_by_a_block_itself_and_by_torchs_own_layers(assert_same_step, selective, make, save):
    plain, model = Whole(make), selective(Whole(make), save, strict=False)  # without an attention, too
    for _ in range(3):
        assert_same_step(plain, model)


def test_a_functional_matmul_is_kept(selective, plan_of, train_step, matmuls):
    model = selective(Whole(Functional), ("matmul",))
    for _ in range(2):
        train_step(model)
    assert {(path, what) for path, what, _ in plan_of(model, 0).decision.calls} == {("", "linear")}
    plain = Whole(Functional)
    assert len(matmuls(lambda: train_step(model))) == len(matmuls(lambda: train_step(plain)))


def test_attention_of_torchs_own_layer_is_kept(selective, train_step, matmuls):
    model = selective(Whole(lambda: encoder_layer(dropout=0.0)), ("attention",))
    for _ in range(2):
        train_step(model)
    assert matmuls(lambda: train_step(model)).count("attention") == 3


def test_one_module_called_twice_in_a_block(selective, assert_same_step):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return x + self.out(self.lin(self.lin(x).relu()).relu())

    plain, model = Whole(Twice), selective(Whole(Twice), ("matmul",))
    for _ in range(3):
        assert_same_step(plain, model)


def test_a_block_called_twice_in_a_forward(selective, assert_same_step):
    class Shared(Whole):
        def forward(self, ids):
            x = self.embed(ids)
            for layer in [*self.layers, *self.layers]:
                x = layer(x)
            return x

    plain, model = Shared(Functional), selective(Shared(Functional))
    for _ in range(3):
        assert_same_step(plain, model)


def test_a_registered_op_by_name(selective, train_step, plan_of):
    calls = []

    @torch.library.custom_op("ac_core_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2

    counted.register_autograd(lambda _ctx, grad: grad * 2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return x + self.b(torch.ops.ac_core_tests.counted(self.a(x)).sin())

    model = selective(Whole(Block), ("ac_core_tests::counted",))
    for _ in range(2):
        train_step(model)
    calls.clear()
    train_step(model)
    assert len(calls) == 3


def test_no_region_no_interception(decoder, selective):
    model = selective(decoder())
    with torch.no_grad():
        expected = decoder()(torch.zeros(1, 4, dtype=torch.long))
        assert torch.equal(model(torch.zeros(1, 4, dtype=torch.long)), expected)


def test_an_instance_forward_that_was_there_before_is_used_and_comes_back(decoder, selective, assert_same_step):
    class Scaled:
        def __init__(self, module):
            self.module = module

        def __call__(self, x):
            return type(self.module).forward(self.module, x) * 3

    def build():
        model = decoder()
        for layer in model.layers:
            layer.mlp.forward = Scaled(layer.mlp)
        return model

    model = selective(build())
    for _ in range(2):
        assert_same_step(build(), model)
    ac_core.remove_activation_checkpointing(model)
    assert all(isinstance(layer.mlp.__dict__["forward"], Scaled) for layer in model.layers)
