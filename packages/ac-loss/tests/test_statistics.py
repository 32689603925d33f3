import pytest
import torch

from ac_loss import TokenStatistics, linear_cross_entropy, reference, token_statistics


def test_fields_and_shapes(draw):
    inputs = draw((4, 5), 31, 13, dtype=torch.bfloat16)
    inputs["labels"][0, 0] = -100
    found = token_statistics(**inputs)
    assert isinstance(found, TokenStatistics)
    assert {tensor.shape for tensor in found} == {(4, 5)}
    dtypes = [tensor.dtype for tensor in found]
    assert dtypes == [torch.float32, torch.float32, torch.int64, torch.bool]
    assert found.accuracy.dtype == torch.float32
    assert token_statistics(**draw(3, 5, 2)).log_probs.dtype == torch.float64
    # What an ignored token shows.
    assert [tensor[0, 0].item() for tensor in found] == [0.0, 0.0, -1, False]


def test_log_probs_are_the_loss(draw, gradients):
    inputs = draw(40, 31, 13)
    options = {"softcap": 3.0, "logit_scale": 0.5}
    found = gradients(lambda **given: token_statistics(**given, **options).log_probs, inputs, -1.5)
    right = gradients(linear_cross_entropy, inputs, 1.5, reduction="none", **options)
    torch.testing.assert_close(found[0], -right[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found[1], right[1], rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("small_pieces")
def test_each_token_and_each_statistic_has_a_gradient_of_its_own(draw, gradients):
    inputs = draw((5, 8), 31, 13)
    first, second = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def mix(function):
        def mixed(**given):
            found = function(**given)
            return first * found.log_probs + second * found.logsumexp

        return mixed

    loss, grads = gradients(mix(token_statistics), inputs)
    right, right_grads = gradients(mix(reference.token_statistics), inputs)
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grads, right_grads, rtol=1e-12, atol=1e-12)


def test_without_labels_every_token_has_what_needs_none(draw, gradients):
    inputs = draw(40, 31, 13) | {"labels": None}
    found = token_statistics(**inputs)
    logits = torch.nn.functional.linear(inputs["hidden"], inputs["weight"], inputs["bias"])
    torch.testing.assert_close(found.logsumexp, logits.logsumexp(1), rtol=1e-12, atol=0)
    assert torch.equal(found.argmax, logits.argmax(1))
    assert found.log_probs is None
    assert found.correct is None
    with pytest.raises(ValueError, match="accuracy: needs labels"):
        found.accuracy  # noqa: B018


@pytest.mark.parametrize("bf16_products", [torch.bfloat16], indirect=True, ids=str)
def test_the_argmax_of_rounded_logits_is_that_of_the_same_rounded_logits(draw, bf16_products):
    # In bf16 many logits are equal: the first of them is the one.
    inputs = draw(200, 500, 8, dtype=torch.bfloat16, ignored=0.0)
    del inputs["bias"]
    logits = inputs["hidden"] @ inputs["weight"].t()
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 1).any()
    assert torch.equal(token_statistics(**inputs).argmax, logits.argmax(1))


@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_counts(draw, gradients, tokens):
    inputs = draw(tokens, 31, 13, ignored=1.1)
    found = token_statistics(**inputs)
    assert found.accuracy == 0
    assert found.argmax.tolist() == [-1] * tokens
    for field in ("log_probs", "logsumexp"):
        value, grads = gradients(lambda field=field, **given: getattr(token_statistics(**given), field), inputs)
        assert torch.equal(value, torch.zeros(tokens, dtype=torch.float64))
        assert not any(grad.any() for grad in grads.values())


def test_an_ignored_row_may_hold_nan(draw, gradients):
    inputs = draw(30, 31, 13)
    ignored = inputs["labels"] == -100
    clean = gradients(lambda **given: token_statistics(**given).logsumexp, inputs)
    inputs["hidden"][ignored] = float("nan")
    dirty = gradients(lambda **given: token_statistics(**given).logsumexp, inputs)
    assert ignored.any()
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)


def test_memory_and_work(draw, recorder):
    inputs = draw(600, 4001, 8, dtype=torch.float32, ignored=0.5)
    hidden = inputs["hidden"].requires_grad_()
    with recorder:
        token_statistics(hidden, inputs["weight"], inputs["labels"]).log_probs.sum().backward()
    # An eighth of the vocabulary and half of the tokens at a time; no product for the weight, which is frozen.
    assert recorder.largest <= 512 * int((inputs["labels"] != -100).sum())
    assert len(recorder.products) == 3 * 8
    recorder.products.clear()
    with recorder, torch.no_grad():
        found = token_statistics(hidden, inputs["weight"], inputs["labels"])
    assert len(recorder.products) == 8
    assert not found.log_probs.requires_grad


def test_autocast(draw, recorder, bf16_products):
    inputs = draw(40, 31, 16, dtype=torch.float32)
    hidden = inputs["hidden"].requires_grad_()
    with recorder, torch.autocast("cpu", torch.bfloat16):
        found = token_statistics(hidden, inputs["weight"], inputs["labels"])
        found.log_probs.sum().backward()
    assert set(recorder.products) == {bf16_products}
    assert found.log_probs.dtype == hidden.grad.dtype == torch.float32


def test_double_backward_is_refused(draw):
    inputs = draw(9, 31, 13)
    hidden = inputs["hidden"].requires_grad_()
    found = token_statistics(hidden, inputs["weight"], inputs["labels"])
    with pytest.raises(RuntimeError, match=r"create_graph=True needs second derivatives.*ac_loss\.reference"):
        torch.autograd.grad(found.logsumexp.sum(), hidden, create_graph=True)


def test_under_torch_compile(draw, gradients):
    torch._dynamo.reset()
    inputs = draw(30, 31, 13, dtype=torch.float32)

    def mixed(hidden, **given):
        found = token_statistics(hidden * 1.0, **given)
        return found.log_probs + found.logsumexp + found.accuracy

    compiled = torch.compile(mixed, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    (loss, grads), (right, right_grads) = gradients(compiled, inputs), gradients(mixed, inputs)
    assert torch.equal(loss, right)
    assert all(torch.equal(grads[name], right_grads[name]) for name in grads)
    (reason,) = torch._dynamo.utils.counters["graph_break"]
    assert "ac_loss drops ignored tokens" in reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "backend: 'triton' is not one of 'auto', 'torch'"),
        ({"softcap": 0.0}, "softcap: 0.0 is not a number above 0"),
        ({"logit_scale": -1.0}, "logit_scale: -1.0 is not a number above 0"),
        ({"ignore_index": None}, "ignore_index: None is not an integer"),
        ({"labels": torch.ones(4, 6).long()}, "labels: must be [4, 5], hidden's shape without its last dimension,"),
        ({"weight": torch.ones(13, 31)}, "hidden: must be [..., 31] to fit weight [13, 31], got [4, 5, 13];"),
        ({"labels": None, "bias": torch.ones(13)}, "bias: must be [31], one for each row of weight, got [13]"),
    ],
)
def test_wrong_arguments_are_named(draw, recorder, change, message):
    inputs = draw((4, 5), 31, 13, dtype=torch.float32) | change
    with recorder, pytest.raises(ValueError, match=r".") as caught:
        token_statistics(**inputs)
    assert str(caught.value).startswith(message)
    assert recorder.products == []
