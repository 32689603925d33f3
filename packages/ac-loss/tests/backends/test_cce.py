"""What Cut Cross-Entropy cannot do, and what its torch_compile does by itself that the adapter mends or refuses."""

import pytest
import torch

from ac_loss import linear_cross_entropy
from ac_loss.backends import cce

pytest.importorskip("triton")
cut_cross_entropy = pytest.importorskip("cut_cross_entropy")


@pytest.fixture(autouse=True)
def few_variants():
    torch._dynamo.reset()  # it compiles with fullgraph=True, and the ninth variant is an error


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"bias_dtype": torch.float32}, "bias"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"z_loss": 0.1}, "z_loss"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"reduction": "none"}, "reduction"),
        ({"accum": "main_grad"}, "main_grad"),
        ({"grad_mode": "recompute"}, "grad_mode"),
        ({"dtype": torch.float64}, "float64"),
        ({"dtype": torch.float16}, "float16"),
        ({"dtype": torch.float32, "device": "cuda", "accum": "param"}, "float16 and bfloat16 only"),
        ({"dtype": torch.bfloat16, "device": "cuda"}, "accum='param'"),
        ({"device": "xpu"}, "xpu"),
    ],
)
def test_what_it_refuses(ask, facts, word):
    (objection,) = cce.objections(ask(**facts))
    assert word in objection


def test_what_it_computes(ask):
    assert cce.objections(ask(softcap=3.0)) == []
    assert cce.objections(ask(torch.bfloat16, "cuda", softcap=3.0, accum="param")) == []


@pytest.mark.parametrize(("device", "implementation"), [("cpu", "torch_compile"), ("cuda", "cce")])
def test_no_gradient_is_dropped(draw, monkeypatch, device, implementation):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("its kernels need a GPU")
    asked = []
    real = cut_cross_entropy.linear_cross_entropy
    spy = lambda *args, **options: asked.append(options) or real(*args, **options)  # noqa: E731
    monkeypatch.setattr(cut_cross_entropy, "linear_cross_entropy", spy)
    inputs = {k: v.to(device) for k, v in draw(12, 64, 32, dtype=torch.bfloat16).items() if k != "bias"}
    linear_cross_entropy(**inputs, backend="cce", accum="param")
    assert [(options["filter_eps"], options["impl"]) for options in asked] == [(None, implementation)]


def test_fp64_losses_are_fp32(draw):
    inputs = draw(12, 31, 8, ignored=0.0)
    loss = cut_cross_entropy.linear_cross_entropy(
        inputs["hidden"], inputs["weight"], inputs["labels"], impl="torch_compile"
    )
    assert loss.dtype == torch.float32


def test_a_second_backward_is_an_error(draw):
    inputs = draw(12, 31, 8, dtype=torch.float32, ignored=0.0)
    loss = cut_cross_entropy.linear_cross_entropy(
        inputs["hidden"].requires_grad_(), inputs["weight"], inputs["labels"], impl="torch_compile"
    )
    with pytest.raises(RuntimeError, match="donated buffers"):
        loss.backward(retain_graph=True)


def test_the_estimate_is_what_torch_compile_holds(draw, peak_bytes, ask):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = draw(1000, 8001, 64, dtype=dtype, ignored=0.0)
        del inputs["bias"]
        estimate = cce.extra_bytes(ask(dtype))
        assert peak_bytes(linear_cross_entropy, inputs, backend="cce") == pytest.approx(estimate, rel=0.15)
