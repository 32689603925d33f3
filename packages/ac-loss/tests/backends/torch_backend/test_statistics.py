import pytest
import torch

from ac_loss import linear_cross_entropy
from ac_loss._job import Job
from ac_loss._objective import Objective
from ac_loss.backends.torch_backend import row_statistics


def job(labels, **objective):
    return Job(objective=Objective(**objective), gemm_dtype=torch.float64, accum="fp32", labels=labels, rows=None)


def spelled_out(hidden, weight, bias, labels):
    """The docstring of RowStatistics, on logits capped at 3 after a scale of 2."""
    logits = 3.0 * torch.tanh(2.0 * (hidden @ weight.t() + bias) / 3.0)
    top = logits.amax(1).detach()
    label = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    return top, logits.logsumexp(1) - top, label - top, logits.mean(1) - top, logits.argmax(1)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("given", [(1,), (2,), (3,), (1, 2), (1, 2, 3)], ids=str)
def test_statistics_and_their_gradients(draw, given):
    inputs = draw(25, 31, 5, ignored=0.0)
    tensors = [inputs[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    capped = job(inputs["labels"], logit_scale=2.0, softcap=3.0, label_smoothing=0.1)
    found = row_statistics(capped, *tensors, argmax=True)
    right = spelled_out(*tensors, inputs["labels"])
    torch.testing.assert_close(found[:4], right[:4], rtol=1e-12, atol=1e-13)
    assert torch.equal(found.argmax, right[4])
    assert not found.top.requires_grad

    upstream = [torch.randn(25, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in given]
    grads = torch.autograd.grad([found[i] for i in given], tensors, upstream)
    right_grads = torch.autograd.grad([right[i] for i in given], tensors, upstream)
    torch.testing.assert_close(grads, right_grads, rtol=1e-11, atol=1e-13)


@pytest.mark.usefixtures("small_pieces")
def test_what_is_not_asked_for_is_not_there(draw):
    inputs = draw(25, 31, 5, ignored=0.0)
    found = row_statistics(job(inputs["labels"]), inputs["hidden"], inputs["weight"], None)
    assert found.mean is None
    assert found.argmax is None


@pytest.fixture
def logits_of(monkeypatch):
    """Statistics of rows of logits that are given as they are, in tiles of two classes."""
    from ac_loss.backends.torch_backend import chunking

    for name, value in {"TILE_COLUMNS_FLOOR": 2, "TILE_COLUMNS_STEP": 1, "TILES_LEAST": 100}.items():
        monkeypatch.setattr(chunking, name, value)

    def statistics(rows, labels, dtype=torch.float64):
        hidden, weight = torch.ones(1, 1, dtype=dtype), torch.zeros(len(rows), 1, dtype=dtype).requires_grad_()
        bias = torch.tensor(rows, dtype=dtype, requires_grad=True)
        work = Job(objective=Objective(), gemm_dtype=dtype, accum="fp32", labels=torch.tensor([labels]), rows=None)
        return bias, row_statistics(work, hidden, weight, bias, argmax=True)

    return statistics


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("row", "argmax"),
    [
        ([1.0, 3.0, 2.0, 3.0, 3.0, 0.0], 1),
        ([-1.0, -2.0, 5.0, 5.0, 5.0], 2),
        ([NAN, 1.0, 9.0, NAN], 0),
        ([1.0, 9.0, NAN, 2.0, NAN], 2),
        ([-INF, -INF, -INF, 1.0, -INF], 3),
        ([-INF, -INF, -INF], 0),
        ([0.0, INF, 5.0, INF], 1),
    ],
)
def test_the_argmax_is_torch_s(logits_of, row, argmax):
    assert torch.tensor(row).argmax() == argmax
    assert logits_of(row, 0)[1].argmax.tolist() == [argmax]


def test_masked_classes_may_fill_a_tile(logits_of):
    bias, found = logits_of([-INF, -INF, 0.0, 1.0, -INF, -INF], 3)
    loss = found.log_total - found.label
    torch.testing.assert_close(loss, torch.tensor([0.31326168751822286], dtype=torch.float64))
    loss.sum().backward()
    right = torch.tensor([0, 0, 0.2689414213699951, -0.2689414213699951, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(bias.grad, right)


def test_a_large_common_offset_keeps_the_loss(logits_of):
    bias, found = logits_of([1e8, 1e8, 1e8, 1e8], 2, torch.float32)
    loss = found.log_total - found.label
    torch.testing.assert_close(loss, torch.tensor([4.0]).log())
    loss.sum().backward()
    torch.testing.assert_close(bias.grad, torch.tensor([0.25, 0.25, -0.75, 0.25]))


def test_a_nan_is_seen(logits_of):
    _, found = logits_of([0.0, 1.0, 2.0, NAN, 1.0], 0)
    assert found.log_total.isnan()


@pytest.mark.parametrize(
    ("dtype", "bf16_products"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    indirect=["bf16_products"],
    ids=str,
)
def test_the_weight_gradient_is_not_summed_over_tiles(draw, recorder, dtype, bf16_products):
    inputs = draw(64, 2048, 300, dtype=dtype, ignored=0.0)
    leaves = {k: v.requires_grad_() if k != "labels" else v for k, v in inputs.items()}
    with recorder:
        linear_cross_entropy(**leaves, grad_mode="recompute").backward()
    # Four tiles of 512 classes; the one tensor of [vocab, hidden_size] is the gradient itself.
    assert recorder.products == [bf16_products] * 4 * 4
    assert recorder.largest == 2048 * 300
