import pytest
import torch

from ac_loss import FusedLinearCrossEntropy, linear_cross_entropy, reference

WAYS = [{"grad_mode": "forward"}, {"grad_mode": "recompute"}, {"reduction": "none"}]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way.values())))


def owned(weight, value=0.0):
    """A parameter whose owner keeps a main_grad."""
    weight = torch.nn.Parameter(weight.detach().clone())
    weight.main_grad = torch.full_like(weight, value, dtype=torch.promote_types(weight.dtype, torch.float32))
    weight.main_grad = weight.main_grad.detach()
    return weight


@pytest.mark.usefixtures("small_pieces", "bf16_products")
@each_way
@pytest.mark.parametrize(
    ("dtype", "bf16_products"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    indirect=["bf16_products"],
    ids=str,
)
def test_the_gradient_is_added_once_and_in_the_backward(draw, gradients, assert_near, dtype, way):
    inputs = draw(61, 31, 13, dtype=dtype)
    same = {"reduction": way.get("reduction", "mean")}
    wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
    right = gradients(reference.linear_cross_entropy, wide, 3.0, **same)[1]
    weight, hidden = owned(inputs["weight"], 2.0), inputs["hidden"].requires_grad_()
    bias = inputs["bias"].requires_grad_()
    loss = linear_cross_entropy(hidden, weight, inputs["labels"], bias, accum="main_grad", **way)
    assert (weight.main_grad == 2.0).all()
    (3.0 * loss).sum().backward()
    assert weight.grad is None
    assert not hasattr(weight, "grad_added_to_main_grad")
    assert_near(weight.main_grad - 2.0, right["weight"], dtype)
    assert_near(hidden.grad, right["hidden"], dtype)
    assert_near(bias.grad, right["bias"], dtype)


@each_way
def test_microbatches_and_a_kept_graph_add_up(draw, gradients, way):
    inputs = draw(40, 31, 13)
    del inputs["bias"]
    right = gradients(linear_cross_entropy, inputs, **way)[1]["weight"]
    weight = owned(inputs["weight"])
    for _ in range(2):
        loss = linear_cross_entropy(inputs["hidden"], weight, inputs["labels"], accum="main_grad", **way).sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    torch.testing.assert_close(weight.main_grad, 6 * right, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("small_pieces", "bf16_products")
@each_way
def test_main_grad_is_not_rounded_to_the_parameter_s_dtype(draw, way):
    inputs = draw(40, 31, 13, dtype=torch.bfloat16)
    weight = owned(inputs["weight"])
    linear_cross_entropy(inputs["hidden"], weight, inputs["labels"], accum="main_grad", **way).sum().backward()
    assert not torch.equal(weight.main_grad, weight.main_grad.bfloat16().float())


@pytest.mark.parametrize("bf16_products", [torch.float32], indirect=True)
@each_way
def test_main_grad_gets_what_is_multiplied_in_fp32_unrounded(draw, gradients, bf16_products, way):
    inputs = draw(40, 31, 13, dtype=torch.bfloat16)
    del inputs["bias"]
    wide = {name: value.double() if name != "labels" else value for name, value in inputs.items()}
    right = gradients(reference.linear_cross_entropy, wide, reduction=way.get("reduction", "mean"))[1]["weight"]
    weight = owned(inputs["weight"])
    linear_cross_entropy(inputs["hidden"], weight, inputs["labels"], accum="main_grad", **way).sum().backward()
    torch.testing.assert_close(weight.main_grad.double(), right, rtol=0, atol=1e-6 * right.abs().max().item())


@each_way
def test_the_owner_s_hook_is_told(draw, way):
    inputs = draw(40, 31, 13)
    weight = owned(inputs["weight"])
    weight.grad_added_to_main_grad = False
    loss = linear_cross_entropy(inputs["hidden"], weight, inputs["labels"], accum="main_grad", **way).sum()
    assert weight.grad_added_to_main_grad is False
    loss.backward()
    assert weight.grad_added_to_main_grad is True
    assert weight.main_grad.any()


@each_way
@pytest.mark.parametrize("flag", [True, False])
def test_tied_embeddings_under_a_hook_like_megatron_s(way, flag):
    """The rule of Megatron-core's DistributedDataParallel without overlap_grad_reduce, for a weight used twice."""
    torch.manual_seed(0)
    table = owned(torch.randn(11, 8, dtype=torch.float64))
    if flag:
        table.grad_added_to_main_grad, table.zero_out_wgrad = False, True

    def hook(*_):
        added = getattr(table, "grad_added_to_main_grad", False) and not getattr(table, "zero_out_wgrad", False)
        if table.grad is not None and not added:
            table.main_grad.add_(table.grad)
        table.grad = None

    accumulator = table.expand_as(table).grad_fn.next_functions[0][0]
    handle = accumulator.register_hook(hook)
    hidden, labels = table[torch.tensor([1, 2, 3])], torch.tensor([4, 5, 6])
    linear_cross_entropy(hidden, table, labels, accum="main_grad", **way).mean().backward()
    handle.remove()
    assert table.main_grad.norm().item() == pytest.approx(4.12263, abs=5e-6)


@each_way
def test_under_autocast(draw, gradients, way):
    inputs = draw(40, 31, 16, dtype=torch.float32)
    del inputs["bias"]
    with torch.autocast("cpu", torch.bfloat16):
        right = gradients(linear_cross_entropy, inputs, **way)[1]["weight"]
        weight = owned(inputs["weight"])
        loss = linear_cross_entropy(inputs["hidden"], weight, inputs["labels"], accum="main_grad", **way).sum()
    loss.backward()
    assert weight.main_grad.dtype == torch.float32
    torch.testing.assert_close(weight.main_grad, right, rtol=1e-6, atol=1e-7)


def test_under_torch_compile(draw):
    torch._dynamo.reset()
    inputs = draw(40, 31, 13)
    weights = [owned(inputs["weight"]) for _ in range(2)]

    def loss(hidden, weight):
        return linear_cross_entropy(hidden * 1.0, weight, inputs["labels"], accum="main_grad")

    loss(inputs["hidden"], weights[0]).backward()
    torch.compile(loss, backend="aot_eager")(inputs["hidden"], weights[1]).backward()
    assert weights[1].main_grad.any()
    assert torch.equal(weights[0].main_grad, weights[1].main_grad)


@each_way
def test_a_frozen_weight_and_no_grad_need_none(draw, recorder, way):
    inputs = draw(8, 31, 13)
    weight = torch.nn.Parameter(inputs["weight"], requires_grad=False)
    hidden = inputs["hidden"].requires_grad_()
    with recorder:
        linear_cross_entropy(hidden, weight, inputs["labels"], accum="main_grad", **way).sum().backward()
    assert hidden.grad.any()
    assert len(recorder.products) == (2 if way == {"grad_mode": "forward"} else 3)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight.requires_grad_(), inputs["labels"], accum="main_grad", **way)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_way
def test_the_backward_makes_no_second_gradient(draw, recorder, dtype, way, monkeypatch):
    from ac_loss.backends.torch_backend import chunking

    monkeypatch.setattr(chunking, "SLAB_BYTES_CPU", 2**16)
    inputs = draw(32, 2048, 256, dtype=dtype)
    weight = owned(inputs["weight"])
    loss = linear_cross_entropy(inputs["hidden"], weight, inputs["labels"], accum="main_grad", **way).sum()
    with recorder:
        loss.backward()
    # The largest is a tile's part of it, a quarter.
    assert recorder.largest <= 2048 * 256 // 4


def wrong(**change):
    def spoil(weight):
        for name, value in change.items():
            setattr(weight, name, value)
        return weight

    return spoil


@each_way
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: torch.nn.Parameter(w.detach()), "needs weight.main_grad, which is absent; it must be a torch.fl"),
        (wrong(main_grad=7), "needs weight.main_grad, which is int;"),
        (wrong(main_grad=torch.zeros(13, 31)), r"found weight.main_grad as torch.float32 \[13, 31\] on cpu; it must"),
        (wrong(main_grad=torch.zeros(31, 13).bfloat16()), r"found weight.main_grad as torch.bfloat16 \[31, 13\]"),
        (wrong(main_grad=torch.zeros(31, 13, device="meta")), r"found weight.main_grad as torch.float32 .* on meta"),
        (wrong(__fsdp_param__=True), "is not for parameters of Megatron-FSDP"),
        (lambda w: w * 1.0, r"adds to the main_grad of a parameter, and this weight is .* operation \(MulBackward0\)"),
    ],
)
def test_a_weight_that_cannot_take_it_is_refused(draw, recorder, way, spoil, message):
    inputs = draw(20, 31, 13, dtype=torch.float32)
    weight = spoil(owned(inputs["weight"]))
    with recorder, pytest.raises(ValueError, match="accum: 'main_grad' " + message):
        linear_cross_entropy(inputs["hidden"], weight, inputs["labels"], accum="main_grad", **way)
    assert recorder.products == []


def test_a_main_grad_that_is_gone_in_the_backward_is_an_error(draw):
    inputs = draw(20, 31, 13, dtype=torch.float32)
    weight = owned(inputs["weight"])
    loss = FusedLinearCrossEntropy(accum="main_grad")(inputs["hidden"], inputs["labels"], weight)
    del weight.main_grad
    with pytest.raises(ValueError, match=r"needs weight\.main_grad, which is absent"):
        loss.backward()
