import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from ac_loss import linear_cross_entropy, reference
from ac_loss.backends.torch_backend import chunking


def relative_error(got, right):
    return ((got.double() - right).norm() / right.norm()).item()


# Memory --------------------------------------------------------------------------------------------------------------

TOKENS, VOCAB, WIDTH = 2048, 4001, 16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"reduction": "sum", "softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.1, "accum": "param"},
        {"reduction": "none"},
        {"reduction": "mean", "grad_mode": "recompute", "softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.1},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_no_tensor_of_tokens_by_vocab(draw, gradients, recorder, dtype, options):
    for ignored in (0.0, 0.2):
        inputs = draw(TOKENS, VOCAB, WIDTH, dtype=dtype, ignored=ignored)
        with recorder:
            gradients(linear_cross_entropy, inputs, **options)
    assert 0 < recorder.largest <= 512 * VOCAB


def test_the_recorder_sees_logits(draw, gradients, recorder):
    with recorder:
        gradients(reference.linear_cross_entropy, draw(TOKENS, VOCAB, WIDTH, dtype=torch.float32, ignored=0.0))
    assert recorder.largest == TOKENS * VOCAB


def memory_events(run):
    """Bytes allocated (freed, if negative), in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]


def peak_bytes(function, inputs):
    """Most bytes held at a time by forward and backward, beyond what both leave behind (the gradients)."""
    leaves = {k: v.requires_grad_() if k != "labels" else v for k, v in inputs.items()}
    now = most = 0
    for nbytes in memory_events(lambda: function(**leaves).backward()):
        now += nbytes
        most = max(most, now)
    return most - now


def allocated_bytes(run):
    return sum(nbytes for nbytes in memory_events(run) if nbytes > 0)


EACH_WAY = pytest.mark.parametrize(
    ("dtype", "bf16_products"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    indirect=["bf16_products"],
    ids=str,
)


@EACH_WAY
def test_peak_memory_is_one_chunk_of_logits(draw, dtype, bf16_products):
    vocab = 16001
    inputs = draw(TOKENS, vocab, WIDTH, dtype=dtype)
    del inputs["bias"]
    peak = peak_bytes(linear_cross_entropy, inputs)
    chunk = 256 * vocab * 4  # or 512 in bf16
    # Beside the chunk: narrow logits are widened a block at a time, and the weight gradient summed in fp32.
    blocks = 0 if bf16_products == torch.float32 else chunking.BLOCK_BYTES_CPU
    few_copies_of_the_gradient = vocab * WIDTH * (4 + 4 * (dtype == torch.bfloat16))
    assert 0.5 * chunk < peak < 1.01 * chunk + blocks + few_copies_of_the_gradient
    plain = peak_bytes(lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight).float(), labels), inputs)
    assert peak < plain / 5


@pytest.mark.usefixtures("bf16_products")
def test_the_chunk_is_freed_before_the_sum_is_converted(draw, monkeypatch):
    monkeypatch.setattr(chunking, "BLOCK_BYTES_CPU", 2**18)
    monkeypatch.setattr(chunking, "SLAB_BYTES_CPU", 2**18)
    vocab, width = 4001, 512
    inputs = draw(TOKENS, vocab, width, dtype=torch.bfloat16)
    del inputs["bias"]
    chunk, fp32_sum, grad_weight = 256 * vocab * 4, vocab * width * 4, vocab * width * 2
    # grad_weight is not there yet while the chunks are worked on, and the chunk is gone when it is made.
    assert peak_bytes(linear_cross_entropy, inputs) < chunk + fp32_sum - grad_weight + 2**21


def test_one_chunk_needs_no_fp32_sum(draw, monkeypatch, bf16_products):
    monkeypatch.setattr(chunking, "BLOCK_BYTES_CPU", 2**18)
    monkeypatch.setattr(chunking, "SLAB_BYTES_CPU", 2**18)
    tokens, vocab, width = 200, 4001, 512
    inputs = draw(tokens, vocab, width, dtype=torch.bfloat16)
    del inputs["bias"]
    chunk = tokens * vocab * bf16_products.itemsize
    assert peak_bytes(linear_cross_entropy, inputs) < chunk + 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backward_holds_the_weight_gradient_once(draw, dtype):
    vocab, width = 401, 4000
    inputs = draw(100, vocab, width, dtype=dtype, ignored=0.0)
    leaves = {k: v.requires_grad_() if k != "labels" else v for k, v in inputs.items()}
    loss = linear_cross_entropy(**leaves)
    # The forward is outside: what the backward frees of it counts as negative, so only its own allocations are seen.
    assert allocated_bytes(loss.backward) < 2**16
    assert leaves["weight"].grad.shape == (vocab, width)
    # A graph that is kept needs its gradients again, and so returns copies.
    loss = linear_cross_entropy(**leaves)
    assert allocated_bytes(lambda: loss.backward(retain_graph=True)) >= vocab * width * dtype.itemsize


@pytest.mark.parametrize(
    "way", [{"grad_mode": "recompute"}, {"reduction": "none"}, {"grad_mode": "recompute", "softcap": 5.0}], ids=str
)
@EACH_WAY
@pytest.mark.usefixtures("bf16_products")
def test_recomputation_needs_a_tile_and_keeps_nothing(draw, dtype, way, monkeypatch):
    monkeypatch.setattr(chunking, "TILE_BYTES_CPU", 2**20)
    monkeypatch.setattr(chunking, "SLAB_BYTES_CPU", 2**18)
    tokens, vocab, width = 512, 8001, 256
    inputs = draw(tokens, vocab, width, dtype=dtype, ignored=0.0)
    del inputs["bias"]
    # A tile (for narrow products in both dtypes), the gradient of hidden in fp32, a block of the weight gradient and a
    # slab of its product; for wide ones hidden and the tile's part of the weight instead. The slope of a softcap is one
    # tile more, and gone when the slab is there.
    most = (3.5 if "softcap" in way else 3) * 2**20
    assert peak_bytes(lambda **leaves: linear_cross_entropy(**leaves, **way).sum(), inputs) < most
    assert vocab * width * 4 > 7 * 2**20

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear_cross_entropy(inputs["hidden"], inputs["weight"], inputs["labels"], **way)
    inputs_held = {t.untyped_storage().data_ptr() for t in inputs.values()}
    assert sum(t.nbytes for t in kept if t.untyped_storage().data_ptr() not in inputs_held) <= 2 * tokens * 4


# Work ----------------------------------------------------------------------------------------------------------------


def products(recorder, function):
    recorder.products.clear()
    with recorder:
        function()
    return len(recorder.products)


@pytest.mark.parametrize(
    ("way", "again"),  # whether the backward computes the logits once more
    [({"grad_mode": "forward"}, 0), ({"grad_mode": "recompute"}, 1), ({"reduction": "none"}, 1), ({}, 0)],
    ids=str,
)
def test_only_the_needed_products(draw, recorder, way, again):
    inputs = draw(40, 31, 13)
    labels = inputs["labels"]
    for hidden_grad, weight_grad in ((True, True), (True, False), (False, True)):
        hidden = inputs["hidden"].detach().requires_grad_(hidden_grad)
        weight = inputs["weight"].detach().requires_grad_(weight_grad)
        run = lambda h=hidden, w=weight: linear_cross_entropy(h, w, labels, **way).sum()  # noqa: E731
        assert products(recorder, lambda run=run: run().backward()) == 1 + again + hidden_grad + weight_grad
        assert (hidden.grad is None) == (not hidden_grad)
        assert (weight.grad is None) == (not weight_grad)
        with torch.no_grad():
            assert products(recorder, run) == 1
            assert not run().requires_grad


def test_the_backward_of_a_mean_has_no_products(draw, recorder):
    inputs = draw(40, 31, 13)
    loss = linear_cross_entropy(inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_(), inputs["labels"])
    assert products(recorder, loss.backward) == 0


@pytest.mark.parametrize("grad_mode", ["forward", "recompute"])
def test_ignored_rows_do_no_work(draw, recorder, grad_mode, monkeypatch):
    monkeypatch.setattr(chunking, "TILE_ROWS", 256)
    inputs = draw(600, 31, 13, ignored=0.0)
    inputs["labels"][256:] = -100
    with recorder, torch.no_grad():
        linear_cross_entropy(**inputs, grad_mode=grad_mode)
    assert len(recorder.products) == 1


# fp16 ----------------------------------------------------------------------------------------------------------------


def test_fp16_gradients_meet_the_loss_scale_before_they_are_rounded(draw, gradients):
    inputs = draw(2000, 4001, 8, dtype=torch.float16, ignored=0.1)
    inputs["labels"].clamp_(max=1999)
    inputs["weight"] *= 0.1
    wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
    right = gradients(reference.linear_cross_entropy, wide, 2.0**14)[1]
    _, grads = gradients(linear_cross_entropy, inputs, 2.0**14)
    assert {grad.dtype for grad in grads.values()} == {torch.float16}
    assert relative_error(grads["hidden"], right["hidden"]) < 5e-3
    # Classes that are nobody's label have gradients of about 1e-7 before the scale: less than fp16 can hold.
    for name in ("weight", "bias"):
        assert relative_error(grads[name][2000:], right[name][2000:]) < 5e-3


def test_fp16_gradients_in_the_forward_are_refused(draw):
    inputs = draw(20, 31, 13, dtype=torch.float16)
    with pytest.raises(ValueError, match="grad_mode: 'forward' rounds the gradients to float16 before the backward"):
        linear_cross_entropy(**inputs, grad_mode="forward")
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="grad_mode: 'forward' rounds"):
        linear_cross_entropy(**draw(20, 31, 13, dtype=torch.float32), grad_mode="forward")


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("options", [{}, {"accum": "param"}, {"reduction": "none"}], ids=str)
def test_inside_a_selective_checkpoint_that_keeps_products(draw, gradients, options):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        mm = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if mm else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(**inputs):
        return checkpoint(
            lambda: linear_cross_entropy(**inputs, **options),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    inputs = draw(61, 31, 13)
    right_loss, right = gradients(linear_cross_entropy, inputs, **options)
    loss, grads = gradients(checkpointed, inputs)
    assert torch.equal(loss, right_loss)
    assert all(torch.equal(grads[name], right[name]) for name in right)
