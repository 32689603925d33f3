"""The estimate against what forward and backward are seen to allocate."""

import contextlib

import pytest
import torch

from ac_loss import linear_cross_entropy
from ac_loss.backends.torch_backend import chunking, extra_bytes, objections

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
ALL = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.1}

CASES = {  # tokens, hidden size, dtype, facts
    "fp32": (700, 64, F32, {}),
    "fp32, ignored": (700, 64, F32, {"ignored": 0.3}),
    "fp32, one chunk": (200, 512, F32, {}),
    "fp64": (700, 64, F64, {}),
    "bf16": (700, 64, BF16, {}),
    "bf16, ignored": (1100, 64, BF16, {"ignored": 0.3}),
    "bf16, one chunk": (200, 512, BF16, {}),
    "bf16, one larger chunk": (400, 512, BF16, {}),
    "bf16, param, several chunks": (400, 512, BF16, {"accum": "param"}),
    "bf16, small sum": (400, 64, BF16, {}),
    "bf16, main_grad": (1100, 512, BF16, {"accum": "main_grad"}),
    "bf16, main_grad, one chunk": (200, 512, BF16, {"accum": "main_grad"}),
    "autocast, several chunks": (400, 512, F32, {"autocast": BF16}),
    "bf16, wide": (700, 512, BF16, {}),
    "bf16, param": (1100, 512, BF16, {"accum": "param"}),
    "fp32, all options": (700, 64, F32, {"bias": True, **ALL}),
    "bf16, all options": (1100, 64, BF16, {"bias": True, **ALL}),
    "fp32, frozen hidden": (700, 512, F32, {"frozen": "hidden"}),
    "bf16, frozen weight": (1100, 512, BF16, {"frozen": "weight"}),
    "autocast": (700, 512, F32, {"autocast": BF16}),
    "autocast, ignored": (1100, 512, F32, {"autocast": BF16, "ignored": 0.3}),
    "none": (700, 64, F32, {"reduction": "none"}),
    "none, ignored, softcap": (700, 512, F32, {"reduction": "none", "ignored": 0.3, "softcap": 3.0}),
    "recompute": (700, 64, F32, {"grad_mode": "recompute"}),
    "recompute, bf16": (700, 64, BF16, {"grad_mode": "recompute"}),
    "recompute, autocast": (700, 512, F32, {"grad_mode": "recompute", "autocast": BF16, "ignored": 0.3}),
    "recompute, frozen weight": (700, 512, BF16, {"grad_mode": "recompute", "frozen": "weight"}),
    "fp16": (700, 512, F16, {"ignored": 0.3, "softcap": 3.0}),
}
VOCAB = 6144


@pytest.fixture(autouse=True)
def one_thread():
    """oneDNN allocates scratch for narrow products by the thread, and that is not in the estimate."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def multiplies_bf16(dtype, facts):
    return BF16 in (dtype, facts.get("autocast"))


@pytest.mark.parametrize(
    ("name", "bf16_products"),
    [
        (name, products)
        for name, (_, _, dtype, facts) in CASES.items()
        for products in ((BF16, F32) if multiplies_bf16(dtype, facts) else (F32,))
    ],
    indirect=["bf16_products"],
)
def test_the_estimate_is_what_it_holds(draw, peak_bytes, ask, monkeypatch, name, bf16_products):  # noqa: PLR0917
    # At these sizes the real blocks, slabs and tiles would hold everything.
    monkeypatch.setattr(chunking, "TILE_ROWS", 512)
    monkeypatch.setattr(chunking, "BLOCK_BYTES_CPU", 2**21)
    monkeypatch.setattr(chunking, "SLAB_BYTES_CPU", 2**20)
    tokens, width, dtype, facts = CASES[name]
    facts = dict(facts)
    frozen, autocast, ignored = (facts.pop(k, d) for k, d in (("frozen", None), ("autocast", None), ("ignored", 0.0)))
    bias = facts.pop("bias", False)
    inputs = draw(tokens, VOCAB, width, dtype=dtype, ignored=ignored)
    if not bias:
        del inputs["bias"]
    if facts.get("accum") == "main_grad":
        inputs["weight"].main_grad = torch.zeros(VOCAB, width)

    def loss(**leaves):
        if frozen:
            leaves[frozen] = leaves[frozen].detach()
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            return linear_cross_entropy(**leaves, **facts)

    request = ask(
        autocast or dtype,
        hidden_dtype=dtype,
        weight_dtype=dtype,
        bias_dtype=dtype if bias else None,
        tokens=tokens,
        counted=int((inputs["labels"] != -100).sum()),
        vocab=VOCAB,
        hidden_size=width,
        grad_hidden=frozen != "hidden",
        grad_weight=frozen != "weight",
        grad_bias=bias,
        **facts,
    )
    # oneDNN has scratch for narrow products, which is not in the estimate.
    narrow = dtype == F16 or (multiplies_bf16(dtype, {"autocast": autocast}) and bf16_products == BF16)
    assert peak_bytes(loss, inputs) == pytest.approx(extra_bytes(request), rel=0.08 if narrow else 0.015)


def test_evaluation_holds_no_gradient(draw, peak_bytes, ask):
    inputs = draw(700, VOCAB, 64, dtype=F32)
    del inputs["bias"]
    counted = int((inputs["labels"] != -100).sum())
    request = ask(tokens=700, counted=counted, vocab=VOCAB, grad_hidden=False, grad_weight=False)

    def evaluate(**tensors):
        with torch.no_grad():
            loss = linear_cross_entropy(**tensors)
        return loss.requires_grad_()

    assert peak_bytes(evaluate, inputs) == pytest.approx(extra_bytes(request), rel=0.05)


def test_it_is_there_for_everything(ask):
    for facts in ({}, {"dtype": F64}, {"reduction": "none", **ALL}, {"device": "cuda"}, {"accum": "main_grad"}):
        assert objections(ask(**facts)) == []
