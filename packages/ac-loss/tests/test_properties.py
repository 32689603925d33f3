"""Whatever the shapes, dtypes and options: the result and every gradient are the specification's."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ac_loss import linear_cross_entropy, reference, token_statistics
from ac_loss.backends.torch_backend import products

# The fixtures hold no state that one example could leave to the next.
EXAMPLES = settings(
    derandomize=True, max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Gradients scaled by lse, logits and options are larger than 1; this is relative to the largest entry.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 6e-2}


@st.composite
def inputs(draw):
    """Tensors as users have them: any leading shape and strides, frozen or not, with and without a bias."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    vocab, width = draw(st.integers(1, 17)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]))
    ignore_index = draw(st.sampled_from([-100, 0, 3]))
    labels = torch.randint(0, vocab, shape)
    labels[torch.rand(shape) < draw(st.sampled_from([0.0, 0.4, 1.1]))] = ignore_index
    tensors = {"hidden": torch.randn(*shape, width), "weight": torch.randn(vocab, width)}
    if draw(st.booleans()):
        tensors["bias"] = torch.randn(vocab)
    if draw(st.booleans()):  # every second entry of a longer row
        tensors = {k: v.repeat_interleave(2, -1)[..., ::2] for k, v in tensors.items()}
    # Representable in bf16, so that the specification in fp64 sees the same numbers.
    tensors = {k: v.bfloat16().to(dtype).requires_grad_(draw(st.booleans())) for k, v in tensors.items()}
    return tensors | {"labels": labels}, ignore_index


def compare(found, right, dtype):
    assert found.shape == right.shape
    scale = max(1.0, right.abs().max().item()) if right.numel() else 1.0
    torch.testing.assert_close(found.double(), right, rtol=0, atol=TOLERANCE[dtype] * scale)


def leaves(tensors, dtype=None):
    """Copies with gradients of their own, strides kept."""
    copies = {}
    for name, tensor in tensors.items():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor.detach())
        copy = copy.to(dtype) if dtype and name != "labels" else copy
        copies[name] = copy.requires_grad_(tensor.requires_grad)
    return copies


def gradients(tensors, loss, upstream):
    wanted = {k: v for k, v in tensors.items() if v.requires_grad}
    if wanted:
        loss.backward(upstream.to(loss.dtype))
    return {k: v.grad for k, v in wanted.items()}


@pytest.mark.usefixtures("small_pieces")
@EXAMPLES
@given(
    given_inputs=inputs(),
    wide_products=st.booleans(),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    grad_mode=st.sampled_from(["auto", "forward", "recompute"]),
    accum=st.sampled_from(["fp32", "param", "main_grad"]),
    tokens=st.none() | st.integers(1, 50) | st.floats(0.5, 50).map(torch.tensor),
    softcap=st.none() | st.floats(0.5, 50),
    label_smoothing=st.just(0.0) | st.floats(0, 1),
    z_loss=st.just(0.0) | st.floats(0, 1),
    logit_scale=st.just(1.0) | st.floats(0.1, 4),
    strict_nan=st.booleans(),
)
def test_the_loss_is_the_specification_s(  # noqa: PLR0917
    monkeypatch, given_inputs, wide_products, accum, grad_mode, tokens, strict_nan, **options
):
    monkeypatch.setattr(products, "cpu_is_slow_in_bfloat16", lambda: wide_products)
    tensors, ignore_index = given_inputs
    dtype = tensors["hidden"].dtype
    options |= {"ignore_index": ignore_index}
    if options["reduction"] == "none":
        grad_mode = "auto" if grad_mode == "forward" else grad_mode
    else:
        options |= {"num_label_tokens": tokens, "strict_nan": strict_nan}
    torch.manual_seed(0)
    upstream = torch.randn(tensors["labels"].shape if options["reduction"] == "none" else (), dtype=torch.float64)
    wide = leaves(tensors, torch.float64)
    right = reference.linear_cross_entropy(**wide, **options)
    right_grads = gradients(wide, right, upstream)

    mine = leaves(tensors)
    if accum == "main_grad" and mine["weight"].requires_grad:
        wider = torch.promote_types(dtype, torch.float32)
        mine["weight"].main_grad = torch.full_like(mine["weight"], 2.0, dtype=wider, requires_grad=False)
    loss = linear_cross_entropy(**mine, accum=accum, grad_mode=grad_mode, **options)
    grads = gradients(mine, loss, upstream)

    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    if right.isnan().any():
        assert loss.isnan()
    else:
        compare(loss.detach(), right.detach(), dtype)
    if accum == "main_grad" and "weight" in grads:
        assert grads["weight"] is None
        grads["weight"] = mine["weight"].main_grad - 2.0
    for name, grad in right_grads.items():
        compare(grads[name], grad, dtype)


@pytest.mark.usefixtures("small_pieces")
@EXAMPLES
@given(
    given_inputs=inputs(),
    wide_products=st.booleans(),
    with_labels=st.booleans(),
    softcap=st.none() | st.floats(0.5, 50),
    logit_scale=st.just(1.0) | st.floats(0.1, 4),
)
def test_the_statistics_are_the_specification_s(monkeypatch, given_inputs, wide_products, with_labels, **options):
    monkeypatch.setattr(products, "cpu_is_slow_in_bfloat16", lambda: wide_products)
    tensors, ignore_index = given_inputs
    dtype = tensors["hidden"].dtype
    results = []
    for function, copies in (
        (token_statistics, leaves(tensors)),
        (reference.token_statistics, leaves(tensors, torch.float64)),
    ):
        labels = copies.pop("labels")
        labels = labels if with_labels else None
        found = function(**copies, labels=labels, ignore_index=ignore_index, **options)
        torch.manual_seed(0)
        both = torch.randn(2, *found.logsumexp.shape, dtype=torch.float64)
        mixed = found.logsumexp * both[0]
        if labels is not None:
            mixed = mixed + found.log_probs * both[1]
        results.append((found, gradients(copies, mixed, torch.ones_like(mixed))))
    (found, grads), (right, right_grads) = results
    compare(found.logsumexp.detach(), right.logsumexp.detach(), dtype)
    if with_labels:
        compare(found.log_probs.detach(), right.log_probs.detach(), dtype)
    if dtype == torch.float64:  # else rounded logits have ties of their own
        assert torch.equal(found.argmax, right.argmax)
        assert not with_labels or (torch.equal(found.correct, right.correct) and found.accuracy == right.accuracy)
    for name, grad in right_grads.items():
        compare(grads[name], grad, dtype)
