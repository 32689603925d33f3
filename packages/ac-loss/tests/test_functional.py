import functools

import pytest
import torch
import torch.nn.functional as F

from ac_loss import linear_cross_entropy, reference
from ac_loss.reference import linear_cross_entropy as spec

# Against the specification, gradients included -----------------------------------------------------------------------

OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "sum over 50": {"reduction": "sum", "num_label_tokens": 50},
    "softcap": {"softcap": 1.5},
    "smoothing": {"label_smoothing": 0.2},
    "z": {"z_loss": 0.05},
    "scale": {"logit_scale": 0.25},
    "scale, softcap": {"logit_scale": 4.0, "softcap": 3.0},
    "all": {"logit_scale": 0.5, "softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01},
    "all, none": {"reduction": "none", "softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01},
    "param": {"accum": "param"},
    "recompute": {"grad_mode": "recompute"},
    "recompute, param": {"grad_mode": "recompute", "accum": "param", "reduction": "sum", "num_label_tokens": 50},
    "recompute, all": {"grad_mode": "recompute", "softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01},
    "forward": {"grad_mode": "forward", "reduction": "sum"},
}
SHAPES = {  # tokens, vocab, width, share of ignored labels
    "one": (1, 3, 5, 0.0),
    "scalar": ((), 5, 3, 0.0),
    "odd": (61, 31, 13, 0.0),
    "odd, ignored": (61, 31, 13, 0.3),
    "leading": ((3, 2, 7), 11, 4, 0.0),
    "leading, ignored": ((3, 2, 7), 11, 4, 0.6),
}


@pytest.mark.usefixtures("small_pieces", "bf16_products")
@pytest.mark.parametrize(
    ("dtype", "bf16_products"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    indirect=["bf16_products"],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "vocab", "width", "ignored"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_the_specification(draw, gradients, assert_near, dtype, options, tokens, vocab, width, ignored):  # noqa: PLR0917
    inputs = draw(tokens, vocab, width, dtype=dtype, ignored=ignored)
    wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
    upstream = torch.linspace(-1, 2, inputs["labels"].numel(), dtype=torch.float64).reshape(inputs["labels"].shape)
    upstream = upstream if options.get("reduction") == "none" else 1.5
    theirs = {k: v for k, v in options.items() if k not in ("accum", "grad_mode")}
    right, right_grads = gradients(spec, wide, upstream, **theirs)
    loss, grads = gradients(linear_cross_entropy, inputs, upstream, **options)

    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == right.shape
    assert_near(loss, right, dtype)
    for key, grad in grads.items():
        assert grad.dtype == dtype
        assert_near(grad, right_grads[key], dtype)


def test_shifted_views_of_a_batch(draw, gradients):
    inputs = draw((3, 8), 31, 13)
    shifted = lambda f: lambda hidden, labels, **rest: f(hidden[:, :-1], labels=labels[:, 1:], **rest)  # noqa: E731
    loss, grads = gradients(shifted(linear_cross_entropy), inputs)
    right, right_grads = gradients(shifted(spec), inputs)
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, right_grads, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_any_integer_labels(draw, dtype):
    inputs = draw(20, 31, 13, ignored=0.0)
    narrow = inputs | {"labels": inputs["labels"].to(dtype)}
    assert linear_cross_entropy(**narrow).item() == linear_cross_entropy(**inputs).item()


# Ignored labels ------------------------------------------------------------------------------------------------------


def test_ignore_index_may_be_a_class(draw, gradients):
    inputs = draw(40, 5, 13, ignored=0.0)
    loss, _ = gradients(linear_cross_entropy, inputs, ignore_index=0)
    logits = F.linear(inputs["hidden"], inputs["weight"], inputs["bias"])
    torch.testing.assert_close(loss, F.cross_entropy(logits, inputs["labels"], ignore_index=0), rtol=1e-12, atol=0)


# Upstream gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"grad_mode": "recompute"}], ids=str
)
def test_saved_tensors_are_never_changed(draw, options):
    kept = []

    def keep(tensor):
        kept.append((tensor, tensor.clone()))
        return tensor

    inputs = {k: v.requires_grad_() if k != "labels" else v for k, v in draw(40, 31, 13).items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = linear_cross_entropy(**inputs, **options).sum()
    (3 * loss).backward()
    assert len(kept) >= 3
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)


def test_labels_may_change_before_the_backward(draw, gradients):
    inputs = draw(20, 31, 13, ignored=0.0)
    right = gradients(linear_cross_entropy, inputs, reduction="none")[1]["hidden"]
    hidden, labels = inputs["hidden"].clone().requires_grad_(), inputs["labels"].clone()
    loss = linear_cross_entropy(hidden, inputs["weight"], labels, inputs["bias"], reduction="none").sum()
    labels.zero_()
    loss.backward()
    assert torch.equal(hidden.grad, right)


def test_a_weight_changed_before_the_backward_is_noticed(draw):
    inputs = draw(20, 31, 13)
    hidden = inputs["hidden"].requires_grad_()
    loss = linear_cross_entropy(hidden, inputs["weight"], inputs["labels"], reduction="none").sum()
    inputs["weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"grad_mode": "recompute"}], ids=str)
def test_dividing_by_no_labels_leaves_the_gradients_zero(draw, gradients, options):
    # As with logits: the loss is NaN, the upstream gradient infinite, and no parameter is spoilt.
    inputs = draw(20, 31, 13, ignored=1.0)
    loss, grads = gradients(linear_cross_entropy, inputs, torch.tensor(float("inf")), **options)
    assert loss == 0
    assert all(not grad.any() for grad in grads.values())


# Autocast and torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(draw, recorder, assert_near, bf16_products, reduction, backward_inside):  # noqa: PLR0917
    inputs = draw(60, 31, 16, dtype=torch.float32)
    hidden, weight, bias = (inputs[k].requires_grad_() for k in ("hidden", "weight", "bias"))
    with recorder:
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, inputs["labels"], bias, reduction=reduction)
            if backward_inside:
                loss.sum().backward()
        if not backward_inside:
            loss.sum().backward()
    assert set(recorder.products) == {bf16_products}
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    rounded = (t.detach().bfloat16().double().requires_grad_() for t in (hidden, weight))
    right_hidden, right_weight = rounded
    right = spec(right_hidden, right_weight, inputs["labels"], bias.detach().double(), reduction=reduction)
    right.sum().backward()
    assert_near(loss, right, torch.bfloat16)
    assert_near(hidden.grad, right_hidden.grad, torch.bfloat16)
    assert_near(weight.grad, right_weight.grad, torch.bfloat16)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_backward_under_autocast_keeps_the_forward_s_dtype(draw, recorder, reduction):
    inputs = draw(20, 31, 16, dtype=torch.float32)
    hidden, weight = inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_()
    with recorder:
        loss = linear_cross_entropy(hidden, weight, inputs["labels"], reduction=reduction).sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
    assert set(recorder.products) == {torch.float32}


def test_autocast_mixes_dtypes_and_leaves_fp64_alone(draw, recorder):
    inputs = draw(20, 31, 16, dtype=torch.float32)
    inputs["hidden"] = inputs["hidden"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_cross_entropy(**inputs).isfinite()
        with recorder:
            assert linear_cross_entropy(**draw(20, 31, 16)).dtype == torch.float64
    assert recorder.products == [torch.float64]


@pytest.mark.parametrize("narrow", ["hidden", "weight", "bias"])
def test_gradients_in_float16_meet_the_loss_scale_first(draw, gradients, assert_near, narrow):
    inputs = draw(20, 31, 16, dtype=torch.float32)
    inputs[narrow] = inputs[narrow].half()
    tokens, scale = 10**8, 2.0**24  # without the scale every gradient is below what float16 has
    right_inputs = {name: tensor.double() if name != "labels" else tensor for name, tensor in inputs.items()}
    right = gradients(spec, right_inputs, scale, num_label_tokens=tokens)[1]
    with torch.autocast("cpu", torch.bfloat16):
        grads = gradients(linear_cross_entropy, inputs, scale, num_label_tokens=tokens)[1]
        with pytest.raises(ValueError, match="grad_mode: 'forward' rounds the gradients to float16"):
            gradients(linear_cross_entropy, inputs, grad_mode="forward")
    assert grads[narrow].dtype == torch.float16
    assert_near(grads[narrow], right[narrow], torch.bfloat16)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_under_torch_compile(draw, gradients, reduction):
    torch._dynamo.reset()
    inputs = draw(30, 31, 13, dtype=torch.float32)
    eager = gradients(linear_cross_entropy, inputs, 2.0, reduction=reduction)

    @functools.partial(torch.compile, backend="aot_eager")
    def compiled(hidden, **rest):
        return linear_cross_entropy(hidden * 1.0, **rest) * 1.0

    torch._dynamo.utils.counters.clear()
    loss, grads = gradients(compiled, inputs, 2.0, reduction=reduction)
    assert torch.equal(loss, eager[0])
    assert all(torch.equal(grads[name], eager[1][name]) for name in grads)
    (reason,) = torch._dynamo.utils.counters["graph_break"]
    assert "ac_loss drops ignored tokens" in reason
    # Another number of ignored labels, the same compiled code.
    inputs["labels"][::2] = -100
    loss, _ = gradients(compiled, inputs, reduction=reduction)
    assert torch.equal(loss, gradients(linear_cross_entropy, inputs, reduction=reduction)[0])


# Errors at the door --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "trition"}, "backend: 'trition' is not one of 'auto', 'torch'"),
        ({"accum": "fp16"}, "accum: 'fp16' is not one of 'fp32', 'param', 'main_grad'"),
        ({"grad_mode": "backward"}, "grad_mode: 'backward' is not one of 'auto', 'forward', 'recompute'"),
        ({"grad_mode": "forward", "reduction": "none"}, "grad_mode: 'forward' finishes the gradients before"),
        ({"reduction": "avg"}, "reduction: 'avg' is not one of 'none', 'sum', 'mean'"),
        ({"ignore_index": None}, "ignore_index: None is not an integer"),
        ({"ignore_index": 2**63}, "ignore_index: 9223372036854775808 does not fit into the 64 bits of a label"),
        ({"softcap": 0.0}, "softcap: 0.0 is not a number above 0"),
        ({"label_smoothing": -0.1}, "label_smoothing: -0.1 is not a number of at least 0 and at most 1"),
        ({"z_loss": -1e-4}, "z_loss: -0.0001 is not a number of at least 0"),
        ({"logit_scale": 0.0}, "logit_scale: 0.0 is not a number above 0"),
        ({"logit_scale": float("inf")}, "logit_scale: inf is not a number above 0"),
        ({"logit_scale": torch.tensor(2.0)}, "logit_scale: tensor(2.) is not a number above 0"),
        ({"strict_nan": "yes"}, "strict_nan: 'yes' is neither True nor False"),
        ({"num_label_tokens": 0}, "num_label_tokens: must be positive, got 0;"),
        ({"num_label_tokens": torch.tensor(-2)}, "num_label_tokens: must be positive, got -2;"),
        ({"num_label_tokens": float("nan")}, "num_label_tokens: must be positive, got nan;"),
        ({"num_label_tokens": torch.ones(1)}, "num_label_tokens: must be a 0-d tensor, got [1];"),
        ({"num_label_tokens": "20"}, "num_label_tokens: must be a number or a 0-d tensor, got '20'"),
        ({"num_label_tokens": 5, "reduction": "none"}, "num_label_tokens: divides a sum, and reduction 'none' makes"),
        ({"weight": torch.ones(31 * 13)}, "weight: must be [vocab, hidden_size] with vocab > 0, got [403];"),
        ({"weight": torch.ones(13, 31)}, "hidden: must be [..., 31] to fit weight [13, 31], got [4, 5, 13];"),
        ({"labels": torch.ones(4, 6).long()}, "labels: must be [4, 5], hidden's shape without its last dimension,"),
        ({"labels": torch.ones(4, 5)}, "labels: must hold integers, got torch.float32; call labels.long()"),
        ({"labels": torch.ones(4, 5).bool()}, "labels: must hold integers, got torch.bool;"),
        ({"bias": torch.ones(13)}, "bias: must be [31], one for each row of weight, got [13]"),
        ({"weight": torch.ones(31, 13).double()}, "weight: is torch.float64 and hidden is torch.float32;"),
        ({"hidden": torch.ones(4, 5, 13).double()}, "weight: is torch.float32 and hidden is torch.float64;"),
        ({"weight": torch.ones(31, 13).to_sparse()}, "weight: is of layout torch.sparse_coo; call weight.to_dense()"),
        ({"bias": torch.ones(31).bfloat16()}, "bias: is torch.bfloat16 and hidden is torch.float32;"),
        ({"hidden": torch.ones(4, 5, 13).long()}, "hidden: must be float64, float32, bfloat16 or float16, got torch.i"),
        ({"weight": torch.ones(31, 13, device="meta")}, "weight: is on meta and hidden on cpu; move one to the other"),
    ],
)
def test_wrong_arguments_are_named(draw, recorder, change, message):
    inputs = draw((4, 5), 31, 13, dtype=torch.float32) | change
    with recorder, pytest.raises(ValueError, match=r".") as caught:
        linear_cross_entropy(**inputs)
    assert str(caught.value).startswith(message)
    assert recorder.products == []


def test_tensors_without_values_are_refused(draw):
    with pytest.raises(ValueError, match="labels: are on the meta device and have no values; ac_loss.explain takes"):
        linear_cross_entropy(**{name: tensor.to("meta") for name, tensor in draw(20, 31, 13).items()})


def test_numbers_of_other_libraries(draw):
    numpy = pytest.importorskip("numpy")
    inputs = draw(20, 31, 13)
    for count in (numpy.int64(7), numpy.float32(7)):
        loss = linear_cross_entropy(**inputs, num_label_tokens=count)
        assert torch.equal(loss, linear_cross_entropy(**inputs, num_label_tokens=7))
    with pytest.raises(ValueError, match=r"softcap: .* is not a number of Python; pass float\(softcap\)"):
        linear_cross_entropy(**inputs, softcap=numpy.float32(3))
    with pytest.raises(ValueError, match=r"ignore_index: .* is not an integer of Python; pass int\(ignore_index\)"):
        linear_cross_entropy(**inputs, ignore_index=numpy.int64(-100))


def test_something_that_is_no_tensor_is_named(draw):
    inputs = draw((4, 5), 31, 13) | {"weight": torch.nn.Linear(13, 31)}
    with pytest.raises(TypeError, match="weight: a tensor is needed, got Linear; pass its weight"):
        linear_cross_entropy(**inputs)
    with pytest.raises(TypeError, match="labels: a tensor is needed, got list$"):
        linear_cross_entropy(**draw((4, 5), 31, 13) | {"labels": [1, 2]})


def test_exchanged_weight_and_labels_are_named(draw):
    inputs = draw((4, 5), 31, 13)
    with pytest.raises(ValueError, match=r"exchanged; linear_cross_entropy .* \(hidden, weight, labels\)"):
        linear_cross_entropy(inputs["hidden"], inputs["labels"], inputs["weight"])


# Sharded weights -----------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_weight_sharded_over_one_rank_is_that_rank_s(draw, gradients, one_rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    inputs = draw(20, 31, 13)
    right, right_grads = gradients(linear_cross_entropy, inputs)
    places = {"weight": [Shard(0)], "bias": [Shard(0)]}
    sharded = {k: distribute_tensor(v, one_rank, places[k]) if k in places else v for k, v in inputs.items()}
    loss, grads = gradients(linear_cross_entropy, sharded)
    assert torch.equal(loss, right)
    assert torch.equal(grads["hidden"], right_grads["hidden"])
    for name in places:
        assert torch.equal(grads[name].full_tensor(), right_grads[name])


def test_main_grad_of_a_sharded_weight_is_refused(draw, one_rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    inputs = draw(20, 31, 13)
    weight = inputs["weight"] = distribute_tensor(inputs["weight"], one_rank, [Shard(0)])
    inputs["bias"] = distribute_tensor(inputs["bias"], one_rank, [Shard(0)])
    assert linear_cross_entropy(**inputs, accum="main_grad").isfinite()  # frozen: there is nothing to add
    weight.requires_grad_()
    with pytest.raises(ValueError, match="accum: 'main_grad' is for a weight that is a plain tensor, and this one"):
        linear_cross_entropy(**inputs, accum="main_grad")


def test_a_distributed_number_of_tokens_is_refused(draw, one_rank):
    from torch.distributed.tensor import Replicate, distribute_tensor

    tokens = distribute_tensor(torch.tensor(20), one_rank, [Replicate()])
    with pytest.raises(ValueError, match="num_label_tokens: is a DTensor"):
        linear_cross_entropy(**draw(20, 31, 13), num_label_tokens=tokens)


# The same signature as the specification -----------------------------------------------------------------------------


def test_signatures():
    import inspect

    ours = inspect.signature(linear_cross_entropy).parameters
    assert list(ours) == [
        *("hidden", "weight", "labels", "bias", "ignore_index", "reduction", "softcap", "label_smoothing", "z_loss"),
        *("num_label_tokens", "backend", "accum", "logit_scale", "grad_mode", "strict_nan"),
        *("grad_reduce_group", "grad_reduce", "vocab_parallel_group"),
    ]
    theirs = inspect.signature(reference.linear_cross_entropy).parameters
    # The specification has every option that changes a result, and none that only says how it is computed.
    how = {"backend", "accum", "grad_mode", "grad_reduce_group", "grad_reduce", "vocab_parallel_group"}
    common = {name: (p.default, p.kind) for name, p in ours.items() if name not in how}
    assert common == {name: (p.default, p.kind) for name, p in theirs.items()}
