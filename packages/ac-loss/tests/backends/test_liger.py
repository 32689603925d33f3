"""What Liger's function does by itself, and the adapter mends or refuses, or is why auto never takes it."""

import pytest
import torch
import torch.nn.functional as F

from ac_loss.backends import liger

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")


def call(hidden, weight, labels):
    return liger._function().apply(hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum")[0]


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"reduction": "none"}, "reduction"),
        ({"accum": "main_grad"}, "main_grad"),
        ({"grad_mode": "recompute"}, "grad_mode"),
        ({"dtype": torch.float64}, "float64"),
        ({"dtype": torch.float16}, "float16"),
    ],
)
def test_what_it_refuses(ask, device, facts, word):
    (objection,) = liger.objections(ask(device=device, **facts))
    assert word in objection


def test_what_it_computes(ask, device):
    facts = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.1, "bias_dtype": torch.bfloat16, "accum": "param"}
    assert liger.objections(ask(torch.bfloat16, device, **facts)) == []


def test_on_a_cpu_only_under_the_interpreter(ask, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (objection,) = liger.objections(ask())
    assert "its kernels are for GPUs" in objection


def test_an_old_release_is_named(ask, device, monkeypatch):
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, _input, weight, target, bias=None): ...

    monkeypatch.setattr(liger, "_function", lambda: Old)
    (objection,) = liger.objections(ask(device=device))
    assert "too old: pip install 'liger-kernel>=0.8.5'" in objection


def test_a_broken_install_is_told(ask, device, monkeypatch):
    def broken():
        raise ModuleNotFoundError("No module named 'numpy'")

    monkeypatch.setattr(liger, "_function", broken)
    (objection,) = liger.objections(ask(device=device))
    assert "cannot be imported (ModuleNotFoundError(\"No module named 'numpy'\"))" in objection


@pytest.fixture
def inputs(draw, device):
    names = ("hidden", "weight", "labels")
    return {k: v.to(device) for k, v in draw(12, 31, 8, dtype=torch.float32, ignored=0.0).items() if k in names}


def test_a_second_backward_scales_the_saved_gradients_again(inputs):
    hidden = inputs["hidden"].requires_grad_()
    loss = call(hidden, inputs["weight"], inputs["labels"])
    first = torch.autograd.grad(3 * loss, hidden, retain_graph=True)[0].clone()
    second = torch.autograd.grad(3 * loss, hidden)[0]
    torch.testing.assert_close(second, 3 * first)


def test_a_frozen_hidden_leaves_the_weight_without_a_gradient(inputs):
    weight = inputs["weight"].requires_grad_()
    loss = call(inputs["hidden"], weight, inputs["labels"])
    assert torch.autograd.grad(loss, weight, allow_unused=True) == (None,)


def test_a_common_offset_swallows_the_loss(device):
    hidden, weight = torch.full((1, 1), 1e8, device=device), torch.ones(2, 1, device=device)
    labels = torch.zeros(1, dtype=torch.int64, device=device)
    assert F.cross_entropy(F.linear(hidden, weight), labels).item() == pytest.approx(0.6931472)
    assert call(hidden, weight, labels).item() == 0.0


def test_the_estimate_for_a_gpu(ask):
    # A chunk of 128 tokens (4096 / ceil(128256 / 2048) is 66, to the next power of two), and the fp32 sum.
    facts = {"tokens": 4096, "counted": 4096, "hidden_size": 2048, "vocab": 128256, "device": "cuda"}
    labels = 8 * 4096
    assert liger.extra_bytes(ask(torch.bfloat16, **facts)) == labels + 128 * 128256 * 2 + 128256 * 2048 * 4
    assert liger.extra_bytes(ask(torch.bfloat16, **facts, accum="param")) == labels + 128 * 128256 * 2
