"""Bytes against torch's CPU allocator, FLOPs and bytes of Llama against the formulas, and no trace of the step."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile, record_function

from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    apply_activation_checkpointing,
    measure,
    remove_activation_checkpointing,
)
from ac_core.proof.meters import LiveBytes

IDS = torch.arange(24).reshape(2, 12) % 32


class Encoder(nn.Module):
    """Attention, norms and dropout over a batch whose tensors are large beside the bookkeeping."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 100)

    def forward(self, x):
        return self.head(self.body(x)).square().mean()


def of_the_allocator(model, x):
    """(bytes alive after the forward, the most at once) by what torch's profiler says the CPU allocator did."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(x)
        gc.collect()
        with record_function("end of forward"):
            pass
        loss.backward()
    now = peak = saved = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
        elif event.name() == "end of forward":
            saved = now
    return saved, peak


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_those_of_the_allocator(policy, dtype):
    torch.manual_seed(0)
    model, x = Encoder().to(dtype), torch.randn(16, 64, 32, dtype=dtype)
    apply_activation_checkpointing(model, ActivationCheckpointingConfig(policy=policy))
    saved, peak = of_the_allocator(model, x)
    usage = measure(model, x)
    states = 3 * torch.get_rng_state().nbytes if policy == "full" else 0  # copies of the generator's state, no tensors
    assert usage.saved_bytes == pytest.approx(saved - states, rel=1e-3)
    assert usage.peak_bytes <= peak
    assert usage.peak_bytes == pytest.approx(peak - states, rel=0.1)  # without what kernels use inside


def test_full_saves_less_and_recomputes(stack):
    model = stack(dropout=0.1)
    plain = measure(model, IDS)
    apply_activation_checkpointing(model, "full")
    full = measure(model, IDS)
    assert full.saved_bytes < plain.saved_bytes / 2
    assert full.peak_bytes < plain.peak_bytes
    assert (full.forward_flops, full.backward_flops) == (plain.forward_flops, plain.backward_flops)
    assert plain.recompute_flops == 0
    up = down = 2 * 24 * 16 * 32
    assert full.recompute_flops == 4 * (up + down)  # what follows the down projection, a product, saves a tensor
    remove_activation_checkpointing(model)
    assert measure(model, IDS) == plain


def test_measuring_twice_gives_the_same(stack):
    model = stack(dropout=0.1)
    for layer in model.layers:
        layer.register_buffer("mask", torch.ones(100, 100))  # the first checkpointed forward looks whether it changes
    apply_activation_checkpointing(model, "full")
    assert measure(model, IDS) == measure(model, IDS)


def llama(layers, dtype):
    transformers = pytest.importorskip("transformers", reason="ac-core alone does not need transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


HIDDEN, FFN, KV, TOKENS, SEQUENCE = 256, 512, 128, 512, 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_on_llama_keeps_one_boundary_a_block_and_recomputes_the_early_stop_floor(dtype):
    ids = torch.arange(TOKENS).reshape(-1, SEQUENCE) % 128
    usages = []
    for layers in (2, 4):
        model = llama(layers, dtype)
        apply_activation_checkpointing(model, "full")
        usages.append(measure(model, {"input_ids": ids, "labels": ids}))
    two, four = usages
    a_block = (four.saved_bytes - two.saved_bytes) / 2
    boundary = dtype.itemsize * HIDDEN * TOKENS
    assert boundary <= a_block <= 1.02 * boundary

    projections = 2 * TOKENS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 2 * HIDDEN * FFN)  # without the down projection
    attention = 2 * 2 * TOKENS * SEQUENCE * HIDDEN
    floor = 4 * (projections + attention)
    assert floor <= four.recompute_flops <= 1.02 * floor


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_hugging_faces_own_checkpointing(use_reentrant):
    ids = torch.arange(TOKENS).reshape(-1, SEQUENCE) % 128
    batch = {"input_ids": ids, "labels": ids}
    model = llama(2, torch.float32)
    apply_activation_checkpointing(model, "full")
    ours = measure(model, batch)
    remove_activation_checkpointing(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    theirs = measure(model, batch)
    assert theirs.saved_bytes == pytest.approx(ours.saved_bytes, rel=0.02)
    down_projections = 2 * 2 * TOKENS * HIDDEN * FFN
    assert theirs.recompute_flops == ours.recompute_flops + (down_projections if use_reentrant else 0)


def test_logits_count_only_where_the_backward_needs_them():
    model = nn.Sequential(nn.Linear(4, 1000))
    x = torch.ones(10, 4)
    assert measure(model, x).saved_bytes == 0  # the weight's gradient needs the batch alone
    assert measure(model, x, loss=lambda logits: logits.square().sum()).saved_bytes == 10 * 1000 * 4


def test_what_the_model_keeps_is_not_for_the_backward():
    class Keeping(nn.Linear):
        def forward(self, x):
            self.cache["last"] = torch.zeros(1000)
            return super().forward(x)

    model = Keeping(4, 4)
    model.cache = {}
    assert measure(model, torch.ones(2, 4)).saved_bytes == 0


def test_a_frozen_model_saves_nothing(stack):
    model = stack().requires_grad_(False)
    model.head.requires_grad_(True)
    assert measure(model, IDS).saved_bytes == IDS.numel() * 16 * 4  # the input of the head


def test_meta_and_fake_tensors_give_the_same(stack):
    model = stack()
    apply_activation_checkpointing(model, "full")
    usage = measure(model, IDS)
    assert measure(stack().to("meta"), IDS.to("meta")) == measure(stack(), IDS)
    with FakeTensorMode():
        fake = stack()
        apply_activation_checkpointing(fake, "full")
        assert measure(fake, torch.zeros(2, 12, dtype=torch.long)) == usage


@pytest.mark.parametrize("fails", [False, True])
def test_no_trace_is_left(stack, fails):
    model = stack(dropout=0.1)
    model(IDS).sum().backward()
    before = [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    batch = IDS.clone()

    def loss(output):
        batch.data_ptr()
        if fails:
            raise ZeroDivisionError
        return output.sum()

    if fails:
        with pytest.raises(ZeroDivisionError):
            measure(model, batch, loss=loss)
    else:
        measure(model, batch, loss=loss)
    assert all(map(torch.equal, before[0], [p.grad for p in model.parameters()]))
    assert torch.equal(before[1], torch.get_rng_state())
    assert torch.equal(batch, IDS)


def test_under_no_grad_and_inference_mode_the_step_is_the_same(stack):
    model = stack()
    expected = measure(model, IDS)
    with torch.no_grad():
        assert measure(model, IDS) == expected
    with torch.inference_mode():
        assert measure(model, torch.arange(24).reshape(2, 12) % 32) == expected


@pytest.mark.parametrize("how", ["the model", "'0'"])
def test_a_compiled_part_is_refused(how):
    block = nn.Sequential(nn.Linear(4, 4))
    model = torch.compile(block, backend="eager") if how == "the model" else nn.Sequential(block)
    if how != "the model":
        block.compile(backend="eager")
    with pytest.raises(ActivationCheckpointingError, match=f"{how} is compiled"):
        measure(model, torch.ones(1, 4))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"model: function is not a torch.nn.Module"):
        measure(lambda x: x, IDS)


def test_how_it_is_shown(stack):
    model = stack()
    usage = measure(model, IDS)
    assert "saved for backward" in str(usage)
    assert "% of" not in str(usage)
    apply_activation_checkpointing(model, "full")
    assert str(measure(model, IDS)).endswith("recompute 196,608 (88.9% of the forward)")
    assert usage.to_dict()["saved_bytes"] == usage.saved_bytes


def test_hooks_that_a_model_installs_in_its_first_forward_are_neither_lost_nor_doubled():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, output_hidden_states=True)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(24).reshape(2, 12)
    measure(model, {"input_ids": ids, "labels": ids})
    assert len(model(input_ids=ids).hidden_states) == 3
    measure(model, {"input_ids": ids, "labels": ids})
    assert len(model(input_ids=ids).hidden_states) == 3


def test_operations_that_are_taken_apart_for_their_flops_count_as_one_in_bytes():
    """`silu_backward` has parts, each with a tensor of its own, and a kernel that allocates none of these."""
    model = nn.Sequential(nn.Linear(8, 512), nn.SiLU(), nn.Linear(512, 8))
    batch = torch.randn(64, 8)
    with LiveBytes() as live:
        model(batch).sum().backward()
    usage = measure(model, batch, loss=lambda output: output.sum())
    assert usage.peak_bytes == pytest.approx(live.peak, abs=8)  # the loss itself, which measure does not hold
