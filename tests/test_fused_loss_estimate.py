"""ac-core's model of a fused loss, which it has without ac-loss, is what ac-loss says of itself."""

import pytest
import torch
from torch import nn

from ac_core.estimation import losses
from ac_core.estimation.fake import fake_mode
from ac_core.proof.meters import LiveBytes
from ac_loss import explain
from ac_loss.backends.torch_backend import products

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("slow", [False, True], ids=["AMX", "no AMX"])
@pytest.mark.parametrize(
    ("tokens", "vocab", "width", "dtype"),
    [
        (4096, 128256, 64, F32),
        (4096, 128256, 64, BF16),
        (4096, 128256, 2048, BF16),
        (1024, 32000, 1024, F32),
        (1024, 32000, 1024, BF16),
        (512, 128256, 2048, BF16),
        (400, 128256, 2048, F32),
        (300, 8192, 256, BF16),
        (40, 8192, 256, BF16),
    ],
    ids=str,
)
def test_the_two_agree(monkeypatch, slow, tokens, vocab, width, dtype):  # noqa: PLR0917
    for module in (losses, products):
        monkeypatch.setattr(module, "cpu_is_slow_in_bfloat16", lambda: slow)
    hidden = torch.empty(tokens, width, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(vocab, width, dtype=dtype, device="meta", requires_grad=True)
    told = explain(hidden, weight, device="cpu", backend="torch")

    with fake_mode():
        head = nn.Linear(width, vocab, bias=False, dtype=dtype)
        losses.use_fused_loss(nn.ModuleDict({"lm_head": head}), "cpu")
        hidden = torch.empty(tokens, width, dtype=dtype, requires_grad=True)
        with LiveBytes() as live:
            head(hidden).sum().backward()
    assert live.peak == pytest.approx(told.gradient_bytes + told.extra_bytes, rel=0.005, abs=2**16)


def test_the_same_processors_are_slow():
    assert losses.cpu_is_slow_in_bfloat16() == products.cpu_is_slow_in_bfloat16()
