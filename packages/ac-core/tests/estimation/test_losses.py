from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingError, estimate
from ac_core.estimation.fake import fake_mode
from ac_core.estimation.losses import chunk_rows, cross_entropy, find_head, own_loss, sum_of_logits, use_fused_loss
from ac_core.proof.meters import LiveBytes


def test_chunks_are_bounded_by_rows_and_bytes_and_even():
    rows = partial(chunk_rows, sum_bytes=0)
    assert rows(8192, 1000, 4) == 256
    assert rows(8192, 1000, 2) == 512
    assert rows(257, 1000, 4) == 129
    assert rows(16384, 256 * 1024, 4) == 128  # 128 MiB of logits
    assert rows(5, 1000, 4) == 5


def test_one_chunk_may_be_larger_where_it_spares_a_sum():
    rows = partial(chunk_rows, sum_bytes=4 * 1000 * 512)
    assert rows(512, 1000, 4) == 512
    assert rows(513, 1000, 4) == 171
    assert chunk_rows(512, 1000, 4, sum_bytes=4 * 1000 * 256) == 256  # the sum is no larger than the logits


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_of_the_formula(dtype, size):
    tokens, vocab, width = 2048, 8192, 64
    with fake_mode():
        head = nn.Linear(width, vocab, bias=False, dtype=dtype)
        model = nn.ModuleDict({"lm_head": head})
        use_fused_loss(model, "cuda")
        hidden = torch.empty(2, tokens // 2, width, dtype=dtype, requires_grad=True)
        with LiveBytes() as live:
            losses = head(hidden)
            gradients = (tokens * width + vocab * width) * size
            assert live.current == pytest.approx(gradients, rel=0.01)  # and one fp32 number a token
            rows = chunk_rows(tokens, vocab, size, sum_bytes=0)
            sweep = rows * vocab * size + rows * width * size
            if size == 2:
                sweep += rows * vocab * 4 + vocab * width * 2
            forward = tokens * width * size + vocab * width * 4 + sweep + 4 * tokens
            assert live.peak == forward
            losses.sum().backward()
            assert live.current == pytest.approx(gradients, rel=0.01)  # those of the parameters now
    assert losses.shape == (2, tokens // 2, 1)
    assert (hidden.grad.shape, head.weight.grad.shape) == (hidden.shape, head.weight.shape)


def test_a_frozen_head_has_no_gradient():
    with fake_mode():
        head = nn.Linear(8, 4096, bias=False).requires_grad_(requires_grad=False)
        use_fused_loss(nn.ModuleDict({"lm_head": head}), "cuda")
        hidden = torch.empty(1024, 8, requires_grad=True)
        with LiveBytes() as live:
            losses = head(hidden)
        assert live.current == 1024 * 8 * 4 + 1024 * 4
        losses.sum().backward()
        assert head.weight.grad is None


def test_heads():
    head = nn.Linear(4, 8)
    model = nn.ModuleDict({"lm_head": head})
    assert find_head(model) is head
    other = nn.Linear(4, 8)
    model.get_output_embeddings = lambda: other
    assert find_head(model) is other
    with pytest.raises(ActivationCheckpointingError, match=r"^loss: 'fused' needs the projection to logits"):
        find_head(nn.Sequential(nn.Linear(4, 8)))


def test_a_model_without_a_head_has_no_fused_loss(stack):
    class Headless(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack()
            self.stack.out, self.stack.head = self.stack.head, None

        def forward(self, input_ids):
            return input_ids

    with pytest.raises(ActivationCheckpointingError, match="give a loss of your own"):
        estimate(Headless, batch_size=1, sequence_length=4, loss="fused")


def test_losses_of_outputs():
    logits = torch.randn(2, 3, 5)
    labels = torch.zeros(2, 3, dtype=torch.long)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for output in (logits, {"logits": logits}, SimpleNamespace(logits=logits), (logits, None)):
        assert torch.equal(cross_entropy(labels, output), expected)
        assert torch.equal(sum_of_logits(output), logits.sum())
    loss = torch.tensor(1.0)
    for output in (loss, {"loss": loss}, SimpleNamespace(loss=loss), (loss, logits)):
        assert own_loss(output) is loss
    with pytest.raises(ActivationCheckpointingError, match=r"^loss: no logits in the model's output \(dict\)"):
        sum_of_logits({})
    with pytest.raises(ActivationCheckpointingError, match=r"^loss: the model was given labels.*\(dict\)"):
        own_loss({})
