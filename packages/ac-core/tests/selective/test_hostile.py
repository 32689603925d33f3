"""Calls and blocks that break the assumption that a call is its result, and nothing but that."""

import dataclasses
import random
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ac_core

numpy = sys.modules.get("numpy")  # torch has loaded it if it is there
D = 16


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def core(self, x):
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.core(x)


class Block(nn.Module):
    attn_class = Attn

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = self.attn_class()
        self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.act = nn.GELU()

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x)).tanh()

    def mlp(self, x):
        return self.down(self.act(self.up(x)))


def steps(kind, save=None, count=4, policy="selective", **options):
    """Gradients and losses of some steps without checkpointing and with it."""
    runs = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(*(kind() for _ in range(3)))
        if checkpointed:
            config = policy
            if policy == "selective":
                config = ac_core.ActivationCheckpointingConfig(policy=policy, save=save)
            ac_core.apply_activation_checkpointing(model, config, blocks=kind, **options)
        runs.append([])
        for step in range(count):
            torch.manual_seed(step)
            model.zero_grad(set_to_none=True)
            loss = model(torch.randn(2, 5, D)).square().mean()
            loss.backward()
            runs[-1] += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return runs, model


def assert_equal(kind, save=None, **options):
    (plain, ours), model = steps(kind, save, **options)
    assert len(plain) == len(ours)
    assert all(map(torch.equal, plain, ours))
    return model


def block(attn=Attn, **methods):
    return type("Odd", (Block,), {"attn_class": attn, **methods})


class LeavesGate(Attn):
    def forward(self, x):
        self.gate = x[..., :1].sigmoid()
        return self.core(x)


class ChangesInput(Attn):
    def forward(self, x):
        x.mul_(0.5)
        return self.core(x)


class FillsDict(Attn):
    def forward(self, x, notes):
        notes["gate"] = x[..., :1].sigmoid()
        return self.core(x)


class Draws(Attn):
    def forward(self, x):
        return self.core(x) * random.random()


class DrawsFromNumPy(Attn):
    def forward(self, x):
        return self.core(x) * float(numpy.random.random())


@dataclasses.dataclass
class Result:
    out: torch.Tensor


class ReturnsObject(Attn):
    def forward(self, x):
        return Result(self.core(x))


class Catches(Attn):
    def forward(self, x):
        if x.shape[1] == 5:
            self.q(x)
            raise ValueError("not for five")
        return self.core(x)


class DropLinear(nn.Linear):
    def forward(self, x):
        return F.linear(F.dropout(x, 0.3), self.weight, self.bias)


def gated(self, x):
    x = x + self.attn(self.n1(x))
    return x + self.mlp(self.n2(x)) * self.attn.gate


def noted(self, x):
    notes = {}
    x = x + self.attn(self.n1(x), notes)
    return x + self.mlp(self.n2(x)) * notes["gate"]


def temporary(self, x):
    y = self.n1(x).sin()
    x = x + self.attn(y) * y
    return x + self.mlp(self.n2(x)).tanh()


def draws_again(self, x):
    x = x + self.attn(self.n1(x))
    return x + self.mlp(self.n2(x)) * random.random() * x


def draws_from_numpy_again(self, x):
    x = x + self.attn(self.n1(x))
    return x + self.mlp(self.n2(x)) * float(numpy.random.random()) * x


def changes_object(self, x):
    result = self.attn(self.n1(x))
    result.out = result.out * 0.3
    return x + self.mlp(self.n2(x + result.out)).tanh()


def caught(self, x):
    try:
        y = self.attn(self.n1(x))
    except ValueError:
        y = self.n1(x).sin()
    return x + self.mlp(self.n2(x + y)).tanh()


def inner_checkpoint(self, x):
    x = x + checkpoint(self.attn, self.n1(x), use_reentrant=False)
    return x + self.mlp(self.n2(x)).tanh()


def gradient_inside(self, x):
    y = self.attn(self.n1(x))
    with torch.enable_grad():
        z = y.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.mlp(z).square().sum(), z)
    return x + y + self.mlp(self.n2(x + grad)).tanh()


def without_gradient(self, x):
    with torch.no_grad():
        y = self.attn(self.n1(x))
    return x + y * self.mlp(self.n2(x)).tanh()


def dropped(self, x):
    return x + self.down(F.dropout(self.act(self.up(self.n2(x))), 0.2)).tanh()


def alternates(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return x + (self.attn if self.calls % 2 else self.other)(self.n1(x)).tanh()


CASES = {
    "attribute": (block(LeavesGate, forward=gated), None),
    "input": (block(ChangesInput, forward=temporary), None),
    "argument": (block(FillsDict, forward=noted), None),
    "python random": (block(Draws, forward=draws_again), None),
    "object": (block(ReturnsObject, forward=changes_object), None),
    "object by glob": (block(ReturnsObject, forward=changes_object), ("attn",)),
    "caught": (block(Catches, forward=caught), ("attn",)),
    "checkpoint inside": (block(forward=inner_checkpoint), None),
    "checkpoint inside, attention": (block(forward=inner_checkpoint), ("attention",)),
    "gradient inside": (block(forward=gradient_inside), None),
    "no gradient": (block(forward=without_gradient), None),
}


@pytest.mark.filterwarnings("ignore:save:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_without_checkpointing(case):
    kind, save = CASES[case]
    assert_equal(kind, save)


class InPlace(Block):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)


@pytest.mark.filterwarnings("ignore:save:UserWarning")
@pytest.mark.parametrize("save", [("act",), ("aten::relu",), ("up",), ("matmul",)], ids=str)
def test_activations_in_place(save):
    assert_equal(InPlace, save)


def test_a_call_that_works_in_place_cannot_be_kept():
    with pytest.raises(ac_core.ActivationCheckpointingError, match="'aten::relu_' matches no call of 0-2 that could"):
        steps(InPlace, ("aten::relu_",))


@pytest.mark.skipif(numpy is None, reason="needs NumPy, which torch does not require")
def test_a_kept_module_that_draws_from_numpy(monkeypatch):
    step = random.seed
    monkeypatch.setattr(random, "seed", lambda seed: (step(seed), numpy.random.seed(seed)))
    assert_equal(block(DrawsFromNumPy, forward=draws_from_numpy_again))


def test_a_linear_that_draws():
    class Dropping(Block):
        forward = dropped

        def __init__(self):
            super().__init__()
            self.up = DropLinear(D, 3 * D)

    assert_equal(Dropping, ("matmul",))


def test_complex_views():
    class Conjugates(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(D, D, dtype=torch.complex64) / 4)

        def forward(self, z):
            return (z.conj() @ self.w) * z.conj()

    class Complex(Block):
        attn_class = Conjugates

        def forward(self, x):
            return x + self.attn(torch.complex(self.n1(x), self.n2(x))).abs().tanh()

    assert_equal(Complex, ("attn",))


def test_sparse_results():
    class Sparse(Attn):
        def forward(self, x):
            return self.core(x).flatten(0, 1).to_sparse()

    class Block2(Block):
        attn_class = Sparse

        def forward(self, x):
            return x + self.attn(self.n1(x)).to_dense().view_as(x)

    assert_equal(Block2, None)
    assert_equal(Block2, ("attn",))


def test_applying_does_not_run_parametrizations():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(parametrizations.spectral_norm(nn.Linear(D, D)) for _ in range(2)))

    before = {name: value.clone() for name, value in build().named_buffers()}
    model = nn.Sequential(build(), build())
    ac_core.apply_activation_checkpointing(model, "selective", blocks="?")
    for name, value in model[0].named_buffers():
        assert torch.equal(value, before[name])


def test_torchs_selective_contexts_beside_ours_are_refused():
    model = nn.Sequential(Block(), Block())

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    ac_core.apply_activation_checkpointing(model, "selective", blocks=Block, context_fn=contexts)
    with pytest.raises(ac_core.ActivationCheckpointingError, match="'selective' cannot run inside a dispatch mode"):
        model(torch.randn(2, 5, D))


def usage(kind, save=None, policy="selective", prepare=lambda model: model, batch=(4, 64, D)):
    torch.manual_seed(0)
    model = prepare(nn.Sequential(*(kind() for _ in range(3))))
    config = ac_core.ActivationCheckpointingConfig(policy=policy, save=save)
    ac_core.apply_activation_checkpointing(model, config, blocks=kind)
    for _ in range(3):
        model(torch.randn(batch)).sum().backward()
    return ac_core.measure(model, torch.randn(batch))


class Modular(Block):
    """Ends in a module whose output no recompute asks for."""

    def __init__(self):
        super().__init__()
        self.ffn = nn.Sequential(self.up, self.act, self.down)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.ffn(self.n2(x))


def test_a_named_module_at_the_end_of_a_block_stays_kept():
    full, kept = usage(Modular, policy="full"), usage(Modular, ("ffn",))
    assert kept.recompute_flops < 0.85 * full.recompute_flops  # without `up`
    assert kept.saved_bytes > full.saved_bytes


def test_frozen_weights_under_adapters_are_kept_as_others():
    def frozen(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("n1" in name or "n2" in name)
        return model

    full = usage(Modular, policy="full", prepare=frozen)
    assert usage(Modular, prepare=frozen).recompute_flops < 0.7 * full.recompute_flops
    short = usage(Modular, ("matmul",), prepare=frozen, batch=(1, 2, D))
    assert short.recompute_flops < 0.5 * usage(Modular, policy="full", prepare=frozen, batch=(1, 2, D)).recompute_flops


def test_a_path_that_the_first_step_did_not_take_is_learnt_later():
    class Alternating(Block):
        forward = alternates

        def __init__(self):
            super().__init__()
            self.other = Attn()

    model = assert_equal(Alternating, ("attention", "matmul"), count=6)
    plan = next(fn.plan for fn in [model[0].forward.context_fn] if hasattr(fn, "plan"))
    assert plan.decision.modules == {"attn", "other"}


def test_a_result_that_is_changed_in_place_is_not_kept_in_vain():
    class InPlace(Block):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU(inplace=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usage_up = usage(InPlace, ("up",))
    assert usage_up.saved_bytes <= 1.01 * usage(InPlace, policy="full").saved_bytes


def test_taking_checkpointing_off_while_a_graph_is_alive():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(2, 5, D)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    ac_core.apply_activation_checkpointing(model, "selective", blocks=Block)
    model(x).sum().backward()
    loss = model(x).sum()
    ac_core.remove_activation_checkpointing(model)
    assert all(map(torch.equal, torch.autograd.grad(loss, list(model.parameters())), expected))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_modules_that_blocks_share_get_one_site_and_lose_it():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        model[1].attn = model[0].attn
        return model

    plain, model = build(), build()
    ac_core.apply_activation_checkpointing(model, "selective", blocks=Block)
    x = torch.randn(2, 5, D)
    for _ in range(3):
        grads = [torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (plain, model)]
        assert all(map(torch.equal, *grads))
    ac_core.remove_activation_checkpointing(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_glob_that_names_only_a_list_is_refused():
    class Listed(Block):
        def __init__(self):
            super().__init__()
            self.ff = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    model = nn.Sequential(Listed(), Listed())
    config = ac_core.ActivationCheckpointingConfig(policy="selective", save=("ff",))
    with pytest.raises(ac_core.ActivationCheckpointingError, match=r"^save: 'ff' .*'ff\.0'"):
        ac_core.apply_activation_checkpointing(model, config, blocks=Listed)


def test_data_parallel_is_refused():
    with pytest.raises(ac_core.ActivationCheckpointingError, match="DistributedDataParallel"):
        ac_core.apply_activation_checkpointing(nn.DataParallel(nn.Sequential(Block(), Block())), blocks=Block)
