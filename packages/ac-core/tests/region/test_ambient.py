"""Switches of the process: a recompute runs under the forward's, whatever they are by then, and leaves them alone."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ac_core import apply_activation_checkpointing
from ac_core.region import ambient


class Watching(nn.Module):
    """Notes what `look()` says in each of its forwards and recomputes."""

    def __init__(self, look, log):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.look = [look, log]

    def forward(self, x):
        look, log = self.look
        log.append(look())
        return x + self.down(self.up(x).sin())


def watched(look):
    log = []
    model = nn.Sequential(*(Watching(look, log) for _ in range(2)))
    for block in model:  # a list would be state, and the recompute would find it as the forward did
        block.look = (look, type("Log", (), {"append": staticmethod(log.append)})())
    apply_activation_checkpointing(model)
    return model, log


def backends():
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch._C._get_overrideable_sdp_enabled(),
        torch._C._get_sdp_priority_order(),
    )


@pytest.mark.parametrize("retain", [False, True], ids=["one backward", "two"])
@pytest.mark.parametrize("inside", [True, False], ids=["around the forward", "around the backward"])
@pytest.mark.parametrize(
    "chosen",
    [([SDPBackend.MATH], False), ([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], True)],
    ids=["math", "priority"],
)
def test_attention_runs_on_the_forwards_backend(chosen, inside, retain):
    model, log = watched(backends)
    before = backends()
    kernels, priority = chosen

    def forward():
        return model(torch.randn(2, 8)).sum()

    if inside:
        with sdpa_kernel(kernels, set_priority=priority):
            loss = forward()
        for _ in range(1 + retain):
            loss.backward(retain_graph=True)
            assert backends() == before
    else:
        loss = forward()
        with sdpa_kernel(kernels, set_priority=priority):
            switched = backends()
            for _ in range(1 + retain):
                loss.backward(retain_graph=True)
                assert backends() == switched
    assert len(log) == 2 * (2 + retain)
    assert all(seen == log[0] for seen in log)
    assert (log[0] != before) == inside


def test_attention_gives_the_gradients_of_the_backend_that_was_forced():
    """The flash kernel of the CPU and the plain one differ in the last bits."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x):
            q, k, v = self.up(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.down(y.transpose(1, 2).flatten(2))

    def gradients(checkpointed):
        torch.manual_seed(0)
        model = nn.Sequential(Attention(), Attention())
        if checkpointed:
            apply_activation_checkpointing(model)
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(torch.randn(2, 64, 64)).square().mean()
        loss.backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradients(False), gradients(True)))


SWITCHES = {
    "float32 matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "float32 matmul, medium": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "TF32": (
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_tf32", value),
        True,
    ),
    "float32 everywhere": (
        lambda: (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision),
        lambda value: setattr(torch.backends, "fp32_precision", value if isinstance(value, str) else "none"),
        "tf32",
    ),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "threads": (torch.get_num_threads, torch.set_num_threads, 2 if torch.get_num_threads() == 1 else 1),
    "cudnn": (
        lambda: torch.backends.cudnn.enabled,
        lambda value: setattr(torch.backends.cudnn, "enabled", value),
        False,
    ),
    "oneDNN": (
        lambda: torch.backends.mkldnn.enabled,
        lambda value: setattr(torch.backends.mkldnn, "enabled", value),
        False,
    ),
    "autocast of another device": (
        lambda: (torch.is_autocast_enabled("xpu"), torch.get_autocast_dtype("xpu")),
        lambda value: (
            torch.set_autocast_enabled("xpu", value is True),
            torch.set_autocast_dtype("xpu", torch.bfloat16 if value is True else value[1]),
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_is_the_forwards_in_the_recompute_and_the_backwards_after_it(name):
    look, switch, value = SWITCHES[name]
    model, log = watched(look)
    x = torch.randn(2, 8)
    before = look()
    try:
        switch(value)
        during = look()
        assert during != before
        if name == "default dtype":
            model, log = watched(look)
            x = x.double()
        loss = model(x).sum()
        switch(before)
        precisions = ambient._precisions()
        loss.backward(retain_graph=True)
        loss.backward()
        assert look() == before
        assert ambient._precisions() == precisions
    finally:
        switch(before)
    assert log == [during] * 6


def test_the_switches_that_only_torchs_private_names_read_are_still_there():
    assert len(ambient._private("_get_sdp_priority_order", "_set_sdp_priority_order")) == 1
    assert len(ambient._private("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable")) == 1
    assert ambient._private("_get_sdp_priority_order", "_no_such_setter") == []


@pytest.fixture(params=ambient._ENGINES)
def engine(request, monkeypatch):
    """A stand-in for Transformer Engine's attention, with the cache that it chooses its backend by."""
    module = ModuleType(request.param)
    module._attention_backends = {"attention_params": None, "backend_selection_requires_update": False}
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_transformer_engines_choice_is_made_as_in_the_forward(engine):
    """Other parameters than the last call's make it choose anew, with more operations, which the recompute repeats."""
    chosen = []

    class Block(nn.Module):
        def __init__(self, params):
            super().__init__()
            self.up, self.down, self.params = nn.Linear(8, 16), nn.Linear(16, 8), params

        def forward(self, x):
            cache = engine._attention_backends
            if cache["attention_params"] != self.params:
                cache.update(attention_params=self.params, use_flash_attention=True)
                chosen.append(self.params)
                x = x * torch.ones(8, requires_grad=True)
            return x + self.down(self.up(x).sin())

    model = nn.Sequential(Block("a"), Block("a"), Block("b"))
    apply_activation_checkpointing(model)
    for step in range(2):
        chosen.clear()
        loss = model(torch.randn(2, 8)).sum()
        left = dict(engine._attention_backends)
        first = ["a", "b"]
        assert chosen == first
        loss.backward(retain_graph=True)
        loss.backward()
        assert chosen == first + ["b", "a"] * 2, step
        assert engine._attention_backends == left


def test_where_it_is_not_imported_nothing_is_looked_up(monkeypatch):
    for name in ambient._ENGINES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert ambient._engine_caches() == []
