import inspect
import json

import pytest
import torch

import ac_loss
from ac_loss import explain, linear_cross_entropy
from ac_loss.backends import NAMES

GIB = 2**30


def llama(dtype=torch.bfloat16, tokens=(2, 2048)):
    """Llama 3.2 1B's head on the meta device."""
    hidden = torch.empty(*tokens, 2048, dtype=dtype, device="meta", requires_grad=True)
    return hidden, torch.empty(128256, 2048, dtype=dtype, device="meta", requires_grad=True)


def test_it_takes_what_the_loss_takes():
    theirs, ours = (inspect.signature(f).parameters for f in (linear_cross_entropy, explain))
    sharded = {"grad_reduce_group", "grad_reduce"}  # what becomes of a gathered weight's gradient has no part in it
    assert set(ours) == {*theirs, "device"} - sharded
    for name, parameter in theirs.items():
        if name in sharded:
            continue
        assert parameter.kind == ours[name].kind
        assert name == "labels" or parameter.default == ours[name].default


def test_on_a_cpu_it_names_torch_and_a_reason_for_every_other(monkeypatch):
    """loss-19."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = explain(*llama(), device="cpu")
    assert found.backend == "torch"
    assert set(found.reasons) == set(NAMES) - {"torch"}
    assert all(found.reasons.values())
    assert any("kernels are for NVIDIA GPUs" in reason for reason in found.reasons["triton"])
    assert any(reason.startswith("only if asked for by name") for reason in found.reasons["liger"])


def test_the_table(bf16_products):
    wide = " multiplied in float32, faster on this CPU" if bf16_products == torch.float32 else ""
    found = explain(*llama(), device="cpu")
    lines = str(found).splitlines()
    assert lines[:5] == [
        "linear_cross_entropy on cpu: backend 'torch'",
        f"4096 tokens (4096 count), vocabulary 128256, hidden size 2048, bfloat16{wide}",
        f"  torch, beyond inputs and gradients  {found.extra_bytes / GIB:>6.3g} GiB",
        "  cross-entropy on logits, the same     6.85 GiB",
        "  the gradients themselves             0.505 GiB",
    ]
    assert lines[5] == "not used:"
    assert [line.split()[0] for line in lines[6:] if not line.startswith("          ")] == list(found.reasons)


def test_bytes():
    found = explain(*llama(), device="cpu")
    assert found.plain_bytes == 14 * 4096 * 128256
    assert found.gradient_bytes == 2 * 2048 * (4096 + 128256)
    # What bf16 with an fp32 sum needs: the sum beside half of it that is returned, and a chunk of logits.
    assert found.extra_bytes == pytest.approx(128256 * 2048 * 4, rel=0.05)
    assert explain(*llama(), device="cpu", accum="param").extra_bytes < found.extra_bytes / 4
    large = explain(*llama(tokens=(64, 2048)), device="cpu")
    assert "219 GiB" in str(large), "whole numbers from 100 on"


def test_what_an_evaluation_costs():
    hidden, weight = llama()
    with torch.no_grad():
        found = explain(hidden, weight, device="cpu")
    assert found.gradient_bytes == 0
    assert found.extra_bytes < explain(hidden, weight, device="cpu").extra_bytes


def test_to_dict_is_json():
    data = json.loads(json.dumps(explain(*llama(), device="cuda", backend="torch").to_dict()))
    assert data["backend"] == "torch"
    assert data["dtype"] == data["product_dtype"] == "bfloat16"
    assert set(data["reasons"]) == set(NAMES) - {"torch"}


def test_labels_that_count(draw, recorder):
    inputs = draw((4, 30), 31, 13, dtype=torch.float32)
    with recorder:
        found = explain(**inputs)
    assert (found.tokens, found.counted) == (120, int((inputs["labels"] != -100).sum()))
    assert recorder.products == []
    assert explain(inputs["hidden"], inputs["weight"]).counted == 120
    meta = {k: v.to("meta") for k, v in inputs.items()}
    assert explain(**meta, device="cpu").counted == 120


def test_it_follows_autocast(draw):
    inputs = draw(4, 31, 13, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert explain(**inputs).dtype == "bfloat16"
    assert explain(**inputs).dtype == "float32"


def test_gradients_in_float16_are_recomputed(draw):
    """As the call does it: a bfloat16 product of a float16 parameter."""
    hidden, weight = llama(torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        found = explain(hidden, weight, device="cpu")
        assert found.extra_bytes == explain(hidden, weight, grad_mode="recompute", device="cpu").extra_bytes
        assert any("rounds gradients to float16" in reason for reason in found.reasons["liger"])
        with pytest.raises(ValueError, match="grad_mode: 'forward' rounds the gradients to float16"):
            explain(hidden, weight, grad_mode="forward", device="cpu")


def test_meta_tensors_are_taken_to_be_on_this_machine():
    expected = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    assert explain(*llama()).device == expected.type


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "trition"}, ValueError, "backend: 'trition' is not one of"),
        ({"softcap": 0.0}, ValueError, "softcap: 0.0 is not a number above 0"),
        ({"strict_nan": "no"}, ValueError, "strict_nan"),
        ({"labels": torch.full((2, 2048), 128256)}, ValueError, "labels: is on cpu and hidden on meta"),
        ({"backend": "native"}, ValueError, "backend: 'native' cannot compute this call:\n  - it sums the loss"),
        ({"device": "gpu"}, ValueError, "device: 'gpu' is no device of torch"),
        ({"weight": None}, TypeError, "weight: a tensor is needed"),
    ],
)
def test_it_raises_what_the_call_would(options, error, message):
    hidden, weight = llama()
    with pytest.raises(error) as caught:
        explain(**{"hidden": hidden, "weight": weight, "device": "cpu"} | options)
    assert str(caught.value).startswith(message)


def test_rows_of_a_shared_vocabulary_are_for_torch(draw):
    found = explain(*llama(), device="cuda", vocab_parallel_group=object())
    assert found.backend == "torch"
    for name in ("triton", "liger", "cce", "native"):
        assert any("rows of the vocabulary that other ranks hold" in reason for reason in found.reasons[name])
    inputs = draw(40, 31, 13, dtype=torch.float32)
    inputs["labels"][:3] = 77  # another rank's
    assert explain(**inputs, vocab_parallel_group=object()).counted == int((inputs["labels"] != -100).sum())
    with pytest.raises(IndexError, match="labels: 77 at flat position 0"):
        explain(**inputs)


def test_a_distributed_tensor_is_refused(monkeypatch):
    hidden, weight = llama()
    monkeypatch.setattr("ac_loss._explain.is_sharded", lambda tensor: tensor is weight)
    weight.placements = ("Shard(dim=0)",)
    with pytest.raises(ValueError, match=r"weight: is a DTensor \(placements .*\); pass a tensor on 'meta'"):
        explain(hidden, weight)


def test_it_is_public():
    assert isinstance(explain(*llama(), device="cpu"), ac_loss.Explanation)
