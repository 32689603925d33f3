from unittest import mock

import pytest
import torch

from ac_loss import linear_cross_entropy
from ac_loss.backends.torch_backend import chunking, products
from ac_loss.backends.torch_backend.products import Projection, operand, product_dtype

X86 = {"architecture": "x86_64", "cpu_name": "Intel Xeon"}


@pytest.mark.parametrize(
    ("has", "slow"),
    [
        (X86 | {"avx512_bf16": True, "amx_bf16": True}, False),
        (X86 | {"avx512_bf16": True, "amx_bf16": False}, True),
        (X86, True),
        (X86 | {"cpu_name": "AMD EPYC 9654"}, True),
        (X86 | {"cpu_name": "AMD EPYC 9654", "avx512_bf16": True}, False),
        ({"architecture": "aarch64", "cpu_name": "Neoverse-V1"}, False),
    ],
)
def test_which_processors_are_slow_in_bf16(monkeypatch, has, slow):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    assert products.cpu_is_slow_in_bfloat16.__wrapped__() is slow


def test_a_processor_that_is_not_told_is_taken_for_a_fast_one(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert products.cpu_is_slow_in_bfloat16.__wrapped__() is False


def test_torch_tells_what_this_processor_has():
    has = torch.cpu.get_capabilities()
    assert {"architecture", "cpu_name"} <= set(has)
    if has["architecture"] == "x86_64":
        assert {"amx_bf16", "avx512_bf16"} <= set(has), "their names are others now: bf16 would be slow, silently"


def test_only_bf16_on_a_cpu_is_multiplied_in_fp32(monkeypatch):
    monkeypatch.setattr(products, "cpu_is_slow_in_bfloat16", lambda: True)
    assert product_dtype(torch.bfloat16, "cpu", 64) == torch.float32
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert product_dtype(dtype, "cpu", 64) == dtype
    assert product_dtype(torch.bfloat16, "cuda", 64) == torch.bfloat16
    assert product_dtype(torch.bfloat16, "cpu", 63) == torch.bfloat16, "converting the weight would be most of the work"


@pytest.mark.parametrize("way", [{}, {"reduction": "none"}, {"grad_mode": "recompute"}], ids=str)
def test_it_is_the_tokens_that_count_that_decide(draw, monkeypatch, way):
    monkeypatch.setattr(products, "cpu_is_slow_in_bfloat16", lambda: True)
    for ignored, wide in ((6, True), (7, False)):
        inputs = draw(70, 31, 16, dtype=torch.bfloat16, ignored=0.0)
        inputs["labels"][:ignored] = -100
        with mock.patch.object(products.torch, "mm", wraps=torch.mm) as mm:
            linear_cross_entropy(**inputs, **way)
        assert {call.args[0].dtype for call in mm.call_args_list} == {torch.float32 if wide else torch.bfloat16}


def test_an_operand_is_rounded_before_it_is_multiplied(bf16_products):
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    found = operand(tensor, torch.bfloat16, bf16_products)
    assert found.dtype == bf16_products
    assert torch.equal(found, tensor.bfloat16().to(bf16_products))
    same = tensor.to(bf16_products)
    assert operand(same, bf16_products, bf16_products) is same


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_projection_is_the_weight_by_slabs(draw, monkeypatch, recorder, bf16_products, weight_dtype):
    monkeypatch.setattr(chunking, "SLAB_BYTES_CPU", 10 * 16 * 4)
    inputs = draw(6, 31, 16, dtype=torch.float32)
    weight, rounded = inputs["weight"].to(weight_dtype), inputs["weight"].bfloat16().double()
    hidden = operand(inputs["hidden"], torch.bfloat16, bf16_products)
    with recorder:
        projection = Projection(weight, torch.bfloat16, bf16_products)
        logits = projection.logits(hidden, torch.empty(6, 31, dtype=bf16_products))
        gradient = projection.gradient(logits)
    tolerance = 1e-5 if bf16_products == torch.float32 else 1e-2
    torch.testing.assert_close(logits.double(), hidden.double() @ rounded.t(), rtol=tolerance, atol=tolerance)
    right = logits.double() @ rounded
    torch.testing.assert_close(gradient.double(), right, rtol=0, atol=tolerance * right.abs().max().item())
    # 31 rows are slabs of 10, 10, 10 and 1, each multiplied twice; the whole weight is never converted for them.
    assert len(recorder.products) == (8 if bf16_products == torch.float32 else 2)
    if bf16_products == torch.float32:
        assert recorder.largest <= 6 * 31
