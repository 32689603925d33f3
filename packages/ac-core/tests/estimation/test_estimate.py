import json
import random
from collections.abc import Callable
from threading import Lock, Thread

import pytest
import torch
from torch import nn

import ac_core
from ac_core import ActivationCheckpointingError, estimate

SHAPE = {"batch_size": 4, "sequence_length": 64}
DTYPES = {torch.float32: 4, torch.bfloat16: 2}


def _real(build: Callable[[], nn.Module], policy: str, dtype: torch.dtype) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = build().to(dtype)
        ac_core.apply_activation_checkpointing(model, policy)
        return model

    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_the_peak_is_what_the_allocator_gives_out(decoder, real_peak, policy, dtype):
    ids = torch.arange(256).reshape(4, 64)
    predicted = estimate(decoder, **SHAPE, policy=policy, dtype=dtype, device="cpu")
    real = real_peak(_real(decoder, policy, dtype), {"input_ids": ids, "labels": ids})
    assert predicted.peak_bytes == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd+momentum", "adamw", "none"])
def test_parameters_gradients_and_state_are_those_of_the_model_and_optimizer(decoder, optimizer):
    states = {"sgd": 0, "sgd+momentum": 1, "adamw": 2, "none": 0}[optimizer]
    size = 2 * sum(p.numel() for p in decoder().parameters())
    found = estimate(decoder, **SHAPE, optimizer=optimizer)
    assert found.parameter_bytes == size
    assert found.gradient_bytes == size
    assert found.optimizer_bytes == pytest.approx(states * size, abs=8 * 100)  # AdamW counts its steps


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_later_microbatch_finds_the_gradients_of_those_before(decoder, real_peak, policy):
    ids = torch.arange(256).reshape(4, 64)
    batch = {"input_ids": ids, "labels": ids}
    settings = {"batch": batch, "dtype": torch.float32, "policy": policy, "device": "cpu"}
    one, three = (estimate(decoder, **settings, gradient_accumulation_steps=count) for count in (1, 3))
    real = real_peak(_real(decoder, policy, torch.float32), batch, microbatches=3)
    assert three.peak_bytes == pytest.approx(real, rel=0.01)
    assert three.peak_bytes > one.peak_bytes
    assert three.gradient_bytes == three.at_peak["gradients"] == one.gradient_bytes
    assert "the step is the last of 3 microbatches" in " ".join(three.assumptions)


def test_tied_weights_and_buffers_count_once(decoder):
    size = 2 * sum(p.numel() for p in decoder(tied=True).parameters())

    def build() -> nn.Module:
        model = decoder(tied=True)
        model.register_buffer("table", torch.zeros(100, dtype=torch.float32))
        return model

    found = estimate(build, **SHAPE)
    assert found.parameter_bytes == size + 400  # a buffer keeps its dtype
    assert found.gradient_bytes == size


def test_what_is_frozen_has_neither_gradients_nor_state(decoder):
    def build() -> nn.Module:
        model = decoder().requires_grad_(requires_grad=False)
        model.norm.requires_grad_(requires_grad=True)
        return model

    found = estimate(build, **SHAPE, optimizer="sgd+momentum")
    assert found.gradient_bytes == found.optimizer_bytes == 2 * 64
    # No gradient goes into the blocks, so that nothing is kept in them.
    assert found.activation_bytes < estimate(decoder, **SHAPE, policy="none").activation_bytes / 10


def test_a_parameter_that_gets_no_gradient_has_no_state(decoder):
    def build() -> nn.Module:
        model = decoder()
        model.unused = nn.Linear(1000, 1000)
        return model

    assert estimate(build, **SHAPE).optimizer_bytes == estimate(decoder, **SHAPE).optimizer_bytes


def test_the_parts_add_up_to_the_peak_and_the_timeline_reaches_it(decoder):
    for policy in ("none", "full"):
        found = estimate(decoder, **SHAPE, policy=policy)
        assert sum(found.at_peak.values()) == found.peak_bytes
        assert max(size for _, size in found.timeline) == found.peak_bytes
        assert dict(found.timeline)[found.peak_moment] == found.peak_bytes
        assert found.activation_bytes == sum(sum(of_block.values()) for of_block in found.activations.values())


def test_full_keeps_one_tensor_a_block(decoder):
    found = estimate(decoder, **SHAPE, policy="full", kernels="fused")
    boundary = 2 * 4 * 64 * 64
    assert [use.kept for use in found.blocks[:-1]] == [boundary] * 3
    plain = estimate(decoder, **SHAPE, policy="none")
    assert plain.recompute_flops == 0
    assert 0 < found.recompute_flops < plain.forward_flops


def test_recompute_is_what_measure_counts(decoder):
    ids = torch.zeros(4, 64, dtype=torch.long)
    for policy in ("full", "selective"):
        model = decoder()
        ac_core.apply_activation_checkpointing(model, policy)
        usage = ac_core.measure(model, {"input_ids": ids, "labels": ids})
        found = estimate(decoder, **SHAPE, policy=policy, dtype=None)
        assert (found.forward_flops, found.backward_flops, found.recompute_flops) == (
            usage.forward_flops,
            usage.backward_flops,
            usage.recompute_flops,
        )


def test_a_real_a_meta_and_a_built_model_give_the_same(decoder):
    with torch.device("meta"):
        meta = decoder()
    built, real, of_meta = (estimate(model, **SHAPE) for model in (decoder, decoder(), meta))
    assert built.to_dict() == real.to_dict() == of_meta.to_dict()


def test_a_factory_may_use_the_meta_device(decoder):
    def build() -> nn.Module:
        with torch.device("meta"):
            return decoder()

    assert estimate(build, **SHAPE).to_dict() == estimate(decoder, **SHAPE).to_dict()


def test_the_given_model_is_left_as_it_was(decoder):
    model = decoder()
    ac_core.apply_activation_checkpointing(model, "full")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = estimate(model, **SHAPE, policy="none", kernels="fused", loss="fused")
    assert found.recompute_flops == 0  # of the policy that is asked for, not of the one that is on
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in model.parameters())
    ids = torch.zeros(1, 8, dtype=torch.long)
    usage = ac_core.measure(model, {"input_ids": ids, "labels": ids})
    assert usage.recompute_flops > 0


def test_no_weight_is_allocated(decoder):
    # Two million parameters would be no proof: this is 100 TB in the dtype asked for.
    found = estimate(lambda: decoder(depth=2, width=2**22), batch_size=1, sequence_length=8)
    assert found.parameter_bytes > 10**14


def test_dropout_and_a_scope_and_layers_are_the_policys(decoder):
    config = ac_core.ActivationCheckpointingConfig(policy="full", layers="0-1")
    found = estimate(lambda: decoder(dropout=0.1), **SHAPE, policy=config)
    assert found.blocks[0].kept < found.blocks[3].kept / 4
    assert found.blocks[0].recompute_flops > 0 == found.blocks[3].recompute_flops


def test_any_module_with_its_batch(stack):
    ids = torch.zeros(2, 12, dtype=torch.long)
    found = estimate(stack(), batch=(ids,), policy="full", loss=lambda output: output.square().mean())
    assert found.peak_bytes > found.parameter_bytes
    assert estimate(stack(), batch=(ids.to("meta"),), policy="full").peak_bytes > 0
    with pytest.raises(ActivationCheckpointingError, match=r"^batch: Stack takes ids and no input_ids.*give one"):
        estimate(stack(), **SHAPE)


def test_a_model_without_a_loss_of_its_own_gets_cross_entropy():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 16)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)) for _ in range(2))
            self.lm_head = nn.Linear(16, 64)

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(x)

    found = estimate(Plain, **SHAPE)
    assert found.loss_bytes >= 3 * 4 * 64 * 64 * 4  # logits, log-probabilities and a gradient in fp32
    assert found.dominant.startswith("float32 [256, 64]")


def test_values_that_only_a_run_has_are_named(decoder):
    class Looks(decoder):
        def forward(self, input_ids, labels=None):
            output = super().forward(input_ids, labels)
            if output.loss > 3:
                output.loss = output.loss * 2
            return output

    with pytest.raises(ActivationCheckpointingError, match=r"Looks looks at values that only a real run has"):
        estimate(Looks, **SHAPE)


def test_values_of_the_batch_are_known(decoder):
    class Looks(decoder):
        def forward(self, input_ids, labels=None):
            longest = int((input_ids != 0).sum(-1).max())
            return super().forward(input_ids[:, :longest], labels[:, :longest])

    ids = torch.ones(4, 64, dtype=torch.long)
    ids[:, 16:] = 0
    short = estimate(Looks, batch={"input_ids": ids, "labels": ids})
    expected = estimate(decoder, batch={"input_ids": ids[:, :16], "labels": ids[:, :16]})
    assert short.activation_bytes == expected.activation_bytes


def test_kept_output_is_counted(decoder):
    logits = 2 * 4 * 64 * 512
    alone, kept = (estimate(decoder, **SHAPE, keep_output=keep) for keep in (False, True))
    assert kept.peak_bytes - alone.peak_bytes == pytest.approx(logits, abs=8)  # and the loss itself
    assert "the training loop holds the loss alone" in str(alone)


def test_fused_loss_and_kernels_need_less_and_are_said(decoder):
    plain = estimate(decoder, **SHAPE, policy="none")
    fused = estimate(decoder, **SHAPE, policy="none", kernels="fused")
    assert fused.activation_bytes < 0.75 * plain.activation_bytes
    assert "fused kernels: 9 norms and 4 gated activations" in str(fused)
    loss = estimate(decoder, batch_size=64, sequence_length=64, loss="fused")
    assert loss.loss_bytes < 0.3 * estimate(decoder, batch_size=64, sequence_length=64).loss_bytes
    assert "fused loss: chunks" in str(loss)


def test_it_can_be_read_and_written(decoder):
    found = estimate(decoder, **SHAPE)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["peak_bytes"] == found.peak_bytes
    assert data["timeline"] == [[name, size] for name, size in found.timeline]
    text = str(found)
    for word in ("policy full", "MiB", "MB", "parameters", "optimizer state", "peak in", found.dominant, "assumed"):
        assert word in text
    assert "GiB" in str(estimate(decoder, batch_size=1024, sequence_length=512))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, r"^batch_size: 0 is not a whole number, at least 1"),
        ({"sequence_length": None}, r"^sequence_length: None is not a whole number.*or a batch"),
        ({"batch": {}}, r"^batch_size: 4 is given beside a batch"),
        ({"policy": "most"}, r"^policy: 'most' is not one of"),
        ({"scope": "audio", "policy": ac_core.ActivationCheckpointingConfig()}, r"^scope: 'audio' is given beside"),
        ({"optimizer": "adam"}, r"^optimizer: 'adam' is not one of 'adamw'"),
        ({"strategy": "fsdp"}, r"^strategy: 'fsdp' is not one of 'none', 'ddp', 'fsdp2'"),
        ({"strategy": "fsdp2", "dp_size": 0}, r"^dp_size: 0 is not a whole number of ranks"),
        ({"dp_size": 2}, r"^dp_size: 2 ranks need a strategy"),
        ({"gradient_accumulation_steps": 0}, r"^gradient_accumulation_steps: 0 is no whole number of microbatches"),
        ({"strategy": "ddp", "dp_size": 4, "ep_size": 3}, r"^ep_size: the 4 ranks of dp_size cannot be divided"),
        ({"loss": "cut"}, r"^loss: 'cut' is not one of 'plain', 'fused'"),
        ({"kernels": "triton"}, r"^kernels: 'triton' is not one of 'plain', 'fused'"),
        ({"device": "tpu"}, r"^device: 'tpu' is not one of 'cuda', 'cpu'"),
    ],
)
def test_settings_that_do_not_exist_are_refused(decoder, settings, message):
    with pytest.raises(ValueError, match=message):
        estimate(decoder, **(SHAPE | settings))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"^model: int is neither a torch.nn.Module nor a function"):
        estimate(3, **SHAPE)
    with pytest.raises(TypeError, match=r"^model: DataParallel is a wrapper; give the model in it"):
        estimate(nn.DataParallel(nn.Linear(2, 2)), **SHAPE)
    with pytest.raises(TypeError, match=r"^model: the factory returned NoneType"):
        estimate(lambda: None, **SHAPE)


def test_a_factorys_config_is_left_as_it_was():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    ac_core.estimate(lambda: transformers.LlamaForCausalLM(config), batch_size=1, sequence_length=8, policy="full")
    assert config.use_cache is True


class _Holding(nn.Module):
    """A block that holds what is no parameter, buffer or number."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.scales = [torch.ones(16), {"more": torch.ones(16)}]
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + self.a(x) * self.scales[0] * self.scales[1]["more"]


def _stack():
    return nn.Sequential(_Holding(), _Holding())


def test_an_instance_is_estimated_as_what_its_factory_builds():
    settings = {"batch": torch.randn(2, 8, 16), "dtype": None, "policy": "none", "device": "cpu"}
    model = _stack()
    state = model[0].generator.get_state()
    assert estimate(model, **settings).peak_bytes == estimate(_stack, **settings).peak_bytes
    assert torch.equal(model[0].generator.get_state(), state)
    model[0].lock = Lock()
    with pytest.raises(ActivationCheckpointingError, match="^model: Sequential cannot be copied .*give a function"):
        estimate(model, **settings)


def test_a_factory_that_copies_modules_has_them_once():
    def layer():
        return nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    settings = {"batch": torch.randn(2, 8, 32), "dtype": None, "policy": "none", "device": "cpu"}
    copied = estimate(lambda: nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False), **settings)
    made = estimate(lambda: nn.Sequential(*(layer() for _ in range(3))), **settings)
    assert copied.at_peak == made.at_peak


def test_what_surrounds_an_estimate_neither_changes_it_nor_is_changed(decoder):
    plain = estimate(decoder, **SHAPE)
    with torch.inference_mode():
        assert estimate(decoder, **SHAPE).peak_bytes == plain.peak_bytes
    with torch.no_grad():
        assert estimate(decoder, **SHAPE).peak_bytes == plain.peak_bytes
    state = random.getstate()
    estimate(decoder, **SHAPE, strategy="fsdp2", dp_size=2)
    assert random.getstate() == state


def test_two_threads_do_not_disturb_each_other(decoder):
    wide = estimate(decoder, **SHAPE, dtype=None).peak_bytes
    found = []
    threads = [
        Thread(target=lambda dtype=dtype: found.append(estimate(decoder, **SHAPE, dtype=dtype).peak_bytes))
        for dtype in (torch.bfloat16, None, torch.bfloat16, None)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found)[2:] == [wide, wide]
    assert torch.get_default_dtype() is torch.float32


def test_numbers_that_are_looked_at_for_overflow_are_finite():
    class Clamping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x):
            x = self.a(x)
            return x if torch.isfinite(x).all() else x.clamp(-1, 1)

    assert estimate(Clamping, batch=torch.randn(2, 16), dtype=torch.float16, policy="none").forward_flops > 0
