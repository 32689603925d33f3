import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ac_core
from ac_core.errors import ActivationCheckpointingError

SAVES = [None, ("attention",), ("matmul",), ("attention", "matmul", "router"), ("mlp",), ("aten::silu", "norm2")]
SHAPES = [{}, {"dropout": 0.2}, {"fused": False, "dropout": 0.2}, {"moe": True}]


@pytest.mark.parametrize("save", SAVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_steps_are_those_without_checkpointing(decoder, selective, assert_same_step, shape, save):
    plain, model = decoder(**shape), selective(decoder(**shape), save, strict=False)  # not every shape has all
    for _ in range(3):  # the first step watches, the second decides by what it saw
        assert_same_step(plain, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(decoder, selective, assert_same_step, dtype):
    plain, model = decoder().to(dtype), selective(decoder().to(dtype))
    for _ in range(3):
        assert_same_step(plain, model)


def test_autocast(decoder, selective, train_step):
    plain, model = decoder(), selective(decoder())
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            (_, left), (_, right) = train_step(plain), train_step(model)
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("options", [{"early_stop": False}, {"preserve_rng_state": False}], ids=str)
def test_other_options(decoder, selective, assert_same_step, options):
    plain, model = decoder(), selective(decoder(), **options)
    for _ in range(3):
        assert_same_step(plain, model)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_backwards_over_one_graph(decoder, selective, train_step, shape):
    plain, model = decoder(**shape), selective(decoder(**shape))
    train_step(model)
    ids = torch.arange(24).reshape(2, 12) % 32
    grads = []
    for each in (plain, model):
        torch.manual_seed(3)
        loss = each(ids).square().mean()
        each.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in each.parameters()])
    assert all(map(torch.equal, *grads))


def test_double_backward(decoder, selective):
    ids = torch.arange(24).reshape(2, 12) % 32
    seconds = []
    for model in (decoder(fused=False), selective(decoder(fused=False))):
        for _ in range(2):
            model.zero_grad()
            grads = torch.autograd.grad(model(ids).square().mean(), list(model.parameters()), create_graph=True)
            sum(grad.square().sum() for grad in grads).backward()
        seconds.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *seconds))


def test_a_kept_output_that_the_block_changes_in_place(assert_same_step, selective):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            y = self.a(x)
            y.mul_(2)
            return x + self.b(y.relu_())

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(32, 16), InPlace(), InPlace(), nn.Linear(16, 32))

    model = selective(build(), ("matmul",))
    for _ in range(3):
        assert_same_step(build(), model)


def test_a_module_that_returns_its_input_and_more(assert_same_step, selective):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x, *, extra):
            return {"same": x, "new": self.lin(x) * extra["scale"], "none": None, "count": 3}

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.out = Odd(), nn.Linear(16, 16)

        def forward(self, x):
            result = self.odd(x, extra={"scale": x.mean()})
            return self.out(result["same"].sin() + result["new"] * result["count"])

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(32, 16), Block(), Block(), nn.Linear(16, 32))

    model = selective(build(), ("odd",))
    for _ in range(3):
        assert_same_step(build(), model)


def test_copies_and_pickles_compute_with_their_own_weights(decoder, selective, train_step, assert_same_step):
    model = selective(decoder())
    train_step(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1.5)
        plain = decoder()
        plain.load_state_dict(twin.state_dict())
        assert_same_step(plain, twin)


def test_nothing_is_left_on_the_modules_after_remove(decoder, selective, train_step):
    model = selective(decoder())
    before = [name for name, _ in decoder().named_modules()]
    train_step(model)
    assert [name for name, _ in model.named_modules()] == before
    ac_core.remove_activation_checkpointing(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_an_outer_checkpoint_gets_all_the_memory_back(decoder, selective, train_step, saved_bytes):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return checkpoint(self.inner, ids, use_reentrant=False)

    plain, full, model = decoder(), decoder(), selective(decoder())
    ac_core.apply_activation_checkpointing(full, "full")
    train_step(model)
    assert saved_bytes(Outer(model)) <= saved_bytes(Outer(full))
    _, expected = train_step(plain)
    _, got = train_step(Outer(model))
    assert all(torch.equal(expected[name], got[f"inner.{name}"]) for name in expected)


def test_hooks_that_offload_see_everything(decoder, selective, train_step):
    plain, model = decoder(), selective(decoder())
    train_step(model)
    (_, expected) = train_step(plain)
    with torch.autograd.graph.save_on_cpu():
        _, got = train_step(model)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_an_error_in_a_forward_leaves_nothing_behind(decoder, selective, assert_same_step):
    model = selective(decoder())
    handle = model.layers[2].mlp.up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.zeros(2, 4, dtype=torch.long))
    handle.remove()
    for _ in range(2):
        assert_same_step(decoder(), model)


def test_two_graphs_alive_and_a_backward_in_another_thread(decoder, selective, train_step):
    plain, model = decoder(), selective(decoder())
    ids = torch.arange(24).reshape(2, 12) % 32
    for _ in range(2):
        results = []
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            first, second = each(ids).square().mean(), each(ids.flip(0)).sin().mean()
            first.backward()
            thread = threading.Thread(target=second.backward)
            thread.start()
            thread.join()
            results.append([p.grad for p in each.parameters()])
        assert all(map(torch.equal, *results))


def test_other_shapes_in_every_step(decoder, selective):
    plain, model = decoder(), selective(decoder())
    for batch, length in ((1, 3), (2, 12), (4, 5), (1, 1)):
        ids = torch.arange(batch * length).reshape(batch, length) % 32
        grads = [torch.autograd.grad(m(ids).square().mean(), list(m.parameters())) for m in (plain, model)]
        assert all(map(torch.equal, *grads))


def test_no_tensor_outlives_its_step(decoder, selective, train_step):
    model = selective(decoder(moe=True))
    train_step(model)
    train_step(model)
    gc.collect()
    gc.disable()
    try:
        outputs = []
        attention = model.layers[1].attention
        handle = attention.register_forward_hook(lambda _m, _a, out: outputs.append(weakref.ref(out[0])))
        train_step(model)
        handle.remove()
        assert outputs
        assert all(output() is None for output in outputs)
    finally:
        gc.enable()


def test_an_adapter_that_is_added_later(decoder, selective, assert_same_step):
    class LoRA(nn.Module):
        def __init__(self, base):
            super().__init__()
            torch.manual_seed(1)
            self.base, self.a, self.b = base, nn.Linear(16, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    def adapted(model):
        model.requires_grad_(requires_grad=False)
        for layer in model.layers:
            layer.attention.q = LoRA(layer.attention.q)
        return model

    model = adapted(selective(decoder()))
    for _ in range(3):
        assert_same_step(adapted(decoder()), model)


def test_random_numbers_of_a_kept_call_that_draws_are_skipped_in_the_recompute(decoder, selective, plan_of, train_step):
    # The attention is not run again, the dropout behind it is: it has to draw what it drew.
    model = selective(decoder(dropout=0.3), ("layers.*.attention",))
    train_step(model)
    state = torch.get_rng_state()
    train_step(model)
    assert plan_of(model, 1).decision.modules == {"attention"}
    after = torch.get_rng_state()
    assert torch.equal(after, state)
    _, expected = train_step(decoder(dropout=0.3))
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(grad, expected[name]) for name, grad in train_step(model)[1].items())


def test_a_tensor_changed_in_place_is_an_error_as_it_is_without_checkpointing(selective):
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            y = self.lin(x).exp()
            z = y * 2
            y.add_(1)  # exp has saved y
            return self.out(z + y)

    model = nn.Sequential(nn.Embedding(32, 16), Wrong(), Wrong())
    selective(model, ("aten::exp",))
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises((ActivationCheckpointingError, RuntimeError), match="in.?place"):
        model(ids).sum().backward()
