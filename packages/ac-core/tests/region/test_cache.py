"""The key/value cache is off while blocks are checkpointed whole, or it stays on and attention is run once."""

import copy
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    apply_activation_checkpointing,
    remove_activation_checkpointing,
)

KEEP = ActivationCheckpointingConfig(keep_cache=True)
IDS = torch.arange(24).reshape(2, 12) % 32 + 3


class Config:
    sub_configs: ClassVar[dict[str, type]] = {}

    def __init__(self, use_cache=True, **fields):
        self.use_cache = use_cache
        self.__dict__.update(fields)


class Cache:
    """Keys (and values: the same here) by layer; appends, as Hugging Face's does."""

    def __init__(self, *prefix):
        self.keys = dict(enumerate(prefix))

    def update(self, keys, layer):
        self.keys[layer] = torch.cat([self.keys[layer], keys], 1) if layer in self.keys else keys
        return self.keys[layer]

    def get_seq_length(self):
        return max((keys.shape[1] for keys in self.keys.values()), default=0)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    """Layers from `shared_from` on have no keys of their own and take those of the layer before it."""

    def __init__(self, index, shared_from):
        super().__init__()
        self.index, self.source = index, (shared_from - 1 if index >= shared_from else None)
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16) if self.source is None else None

    def attend(self, x, keys):
        query = self.query(x)
        return torch.softmax(query @ keys.transpose(1, 2), -1) @ keys

    def forward(self, x, past_key_values=None):
        if self.source is not None:
            return self.attend(x, past_key_values.keys[self.source])
        keys = self.key(x)
        return self.attend(x, keys if past_key_values is None else past_key_values.update(keys, self.index))


class ExplicitAttention(Attention):
    """The shared keys travel in a dict, with or without a cache."""

    def forward(self, x, past_key_values=None, shared_kv_states=None):
        keys = self.key(x) if self.source is None else shared_kv_states[self.source]
        if past_key_values is not None and self.source is None:
            keys = past_key_values.update(keys, self.index)
        shared_kv_states[self.index] = keys
        return self.attend(x, keys)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(), attention, Norm(), MLP()

    def forward(self, x, **kwargs):
        x = x + self.attention(self.norm1(x), **kwargs)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, attention=Attention, shared_layers=0, depth=4):
        super().__init__()
        self.config = Config(num_kv_shared_layers=shared_layers)
        self.explicit = attention is ExplicitAttention
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block(attention(i, depth - shared_layers)) for i in range(depth))

    def forward(self, ids, past_key_values=None):
        if self.config.use_cache and past_key_values is None:
            past_key_values = Cache()
        states = {"shared_kv_states": {}} if self.explicit else {}
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, past_key_values=past_key_values, **states)
        return x


def build(*args, **options):
    torch.manual_seed(0)
    return Model(*args, **options)


@pytest.fixture
def runs_of():
    """Counts how often a module runs in one forward and backward of `model`."""

    def count(model, module):
        calls = []
        handle = module.register_forward_hook(lambda *_: calls.append(1))
        model(IDS).sum().backward()
        handle.remove()
        return len(calls)

    return count


# Off


class DecoderConfig(Config):
    pass


class NestedConfig(Config):
    sub_configs: ClassVar[dict[str, type]] = {"text_config": DecoderConfig}


def nested():
    """Configs in every place: the root's, one below it that no module holds, a deep copy further down."""
    model = build()
    model.config = NestedConfig(text_config=DecoderConfig(use_cache=1))
    model.generation_config = Config()
    model.layers[1].config = copy.deepcopy(model.config)
    model.layers[2].config = Config(use_cache=False)
    return model


def switches(model):
    root, deep, other = model.config, model.layers[1].config, model.layers[2].config
    return [config.use_cache for config in (root, root.text_config, deep, deep.text_config, other)]


@pytest.mark.parametrize("carry", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_every_config_is_off_and_back_after_remove_from_the_model_or_a_copy(carry):
    model = nested()
    report = apply_activation_checkpointing(model)
    assert report.notes == ("key/value cache turned off for training (use_cache=False on 4 configs)",)
    assert not any(switches(model))
    assert model.generation_config.use_cache is True
    taken_off = carry(model)
    remove_activation_checkpointing(taken_off)
    assert switches(taken_off) == [True, 1, True, 1, False]
    if taken_off is not model:
        assert not any(switches(model))


def test_a_read_only_config_is_an_error_and_nothing_is_changed():
    @dataclass(frozen=True)
    class Frozen:
        use_cache: bool = True

    model = build()
    model.layers[0].config = Frozen()
    with pytest.raises(ActivationCheckpointingError, match=r"Frozen\.use_cache=True is read-only.*keep_cache=True"):
        apply_activation_checkpointing(model)
    assert model.config.use_cache is True
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_cache_that_comes_back_is_an_error_with_the_remedies():
    model = build()
    apply_activation_checkpointing(model)
    model.config.use_cache = True
    with pytest.raises(ActivationCheckpointingError, match=r"'layers\.0' was given a key/value cache.*keep_cache=True"):
        model(IDS)
    with torch.no_grad():
        model(IDS)


def test_shared_keys_that_travel_as_states_leave_the_blocks_whole(assert_same_step, saved_bytes):
    model, plain = build(ExplicitAttention, shared_layers=2), build(ExplicitAttention, shared_layers=2)
    report = apply_activation_checkpointing(model)
    assert [(group.asked, group.applied) for group in report.groups] == [("full", "full")]
    assert model.config.use_cache is False
    assert_same_step(plain, model)
    assert saved_bytes(model) * 4 < saved_bytes(plain)


# Kept


def test_keys_shared_through_the_cache_keep_it_and_attention_is_run_once(assert_same_step, runs_of, saved_bytes):
    model, plain = build(shared_layers=2), build(shared_layers=2)
    report = apply_activation_checkpointing(model)
    assert [(group.asked, group.applied) for group in report.groups] == [("full", "sub-modules")]
    assert "attention is run once and keeps what it saves; one by one: norm1, norm2, mlp" in report.groups[0].reason
    why = "its layers share keys through the cache (num_kv_shared_layers=2)"
    assert report.notes == (f"key/value cache left on: {why}",)
    assert model.config.use_cache is True
    assert_same_step(plain, model)
    assert runs_of(model, model.layers[0].attention.query) == 1
    assert runs_of(model, model.layers[0].mlp.up) == 2
    assert saved_bytes(model) < 0.75 * saved_bytes(plain)
    remove_activation_checkpointing(model)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_model_in_pieces_keeps_its_surface_and_its_copies_their_weights(duplicate, assert_same_step):
    def surface(m):
        return list(m.state_dict()), [n for n, _ in m.named_parameters()], [(n, type(x)) for n, x in m.named_modules()]

    model, plain = build(shared_layers=2), build(shared_layers=2)
    apply_activation_checkpointing(model)
    assert surface(model) == surface(plain)
    twin = duplicate(model)
    with torch.no_grad():
        for m in (twin, plain):
            for p in m.parameters():
                p.mul_(1.5)
    assert_same_step(twin, plain)
    remove_activation_checkpointing(twin)
    assert all("forward" not in vars(module) for module in twin.modules())
    assert_same_step(model, build(shared_layers=2))


def test_a_piece_that_two_blocks_share_is_checkpointed_once(assert_same_step, runs_of):
    def tied():
        model = build(shared_layers=2)
        model.layers[1].mlp = model.layers[0].mlp
        return model

    model = tied()
    apply_activation_checkpointing(model)
    assert_same_step(model, tied())
    assert runs_of(model, model.layers[0].mlp.up) == 4


def test_another_tools_checkpointing_of_the_whole_block_is_an_error():
    model = build(shared_layers=2)
    apply_activation_checkpointing(model)
    model.layers[0].gradient_checkpointing = True
    with pytest.raises(ActivationCheckpointingError, match="gradient_checkpointing_disable"):
        model(IDS)


def test_a_prefix_in_the_cache_gets_its_gradient_where_the_cache_is_kept():
    def step(model):
        torch.manual_seed(1)
        prefix = [torch.randn(2, 3, 16, requires_grad=True) for _ in range(4)]
        model.zero_grad()
        model(IDS, past_key_values=Cache(*prefix)).square().sum().backward()
        return [t.grad for t in (*prefix, *model.parameters())]

    whole = build()
    apply_activation_checkpointing(whole)
    with pytest.raises(ActivationCheckpointingError, match=r"argument past_key_values.*keep_cache=True"):
        step(whole)
    kept = build()
    report = apply_activation_checkpointing(kept, KEEP)
    assert report.notes == ("key/value cache left on: keep_cache=True",)
    assert all(map(torch.equal, step(build()), step(kept)))


def test_a_block_without_a_cache_stays_whole_beside_one_with(runs_of):
    model = build(shared_layers=2)
    model.tail = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2))
    report = apply_activation_checkpointing(model)
    assert {group.label: group.applied for group in report.groups} == {
        "layers.0-3": "sub-modules",
        "tail.0-1": "full",
    }


def test_a_block_that_only_reads_the_cache_stays_whole_and_keeps_it_on(assert_same_step, runs_of):
    def reading():
        model = build(shared_layers=2)
        model.config.num_kv_shared_layers = 0  # nothing but the declaration of the blocks
        for layer in model.layers[2:]:
            layer._can_checkpoint_with_cache = True
        return model

    model = reading()
    report = apply_activation_checkpointing(model)
    assert {group.label: group.applied for group in report.groups} == {
        "layers.0-1": "sub-modules",
        "layers.2-3": "full",
    }
    assert report.notes == ("key/value cache left on: some of its blocks only read a cache that others fill",)
    assert_same_step(reading(), model)
    assert runs_of(model, model.layers[3].attention.query) == 2


def test_attention_that_is_a_block_of_its_own_cannot_be_checkpointed():
    model = build()
    with pytest.raises(ActivationCheckpointingError, match=r"'layers\.0\.attention': the cache stays on.*blocks="):
        apply_activation_checkpointing(model, KEEP, blocks=Attention)
    lenient = ActivationCheckpointingConfig(keep_cache=True, strict=False)
    with pytest.warns(UserWarning, match="nothing beside attention"):
        report = apply_activation_checkpointing(model, lenient, blocks=[Attention, MLP])
    assert {group.applied for group in report.groups if "attention" in group.label} == {"none"}
    assert report.applied_blocks == tuple(f"layers.{i}.mlp" for i in range(4))


# Hugging Face

SHARING = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
}  # fmt: skip


def gemma4():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SHARING, global_head_dim=8))


def gemma3n():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(**SHARING, activation_sparsity_pattern=[0.0] * 4, laurel_rank=8)
    return transformers.Gemma3nForCausalLM(config)


class Logits(nn.Module):
    """A causal language model as the shared fixtures call one: token ids in, a tensor out."""

    def __init__(self, model, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, ids):
        return self.model(input_ids=ids + 3, **self.options).logits


@pytest.mark.parametrize("family", [gemma4, gemma3n], ids=lambda f: f.__name__)
def test_gemma_whole_blocks_are_exact_and_keep_a_third_of_sub_modules(family, assert_same_step, saved_bytes):
    plain, whole, kept = Logits(family()), Logits(family()), Logits(family(), use_cache=True)
    assert {g.applied for g in apply_activation_checkpointing(whole).groups} == {"full"}
    assert {g.applied for g in apply_activation_checkpointing(kept, KEEP).groups} == {"sub-modules"}
    assert_same_step(plain, whole)
    assert_same_step(plain, kept)
    none, by_block, by_piece = map(saved_bytes, (Logits(family(), use_cache=True), whole, kept))
    assert 3 * by_block < by_piece < none


@pytest.mark.parametrize("family", [gemma4, gemma3n], ids=lambda f: f.__name__)
def test_shared_states_survive_a_second_backward(family):
    grads = []
    for model in (Logits(family()), Logits(family())):
        if grads:
            apply_activation_checkpointing(model)
        loss = model(IDS).square().mean()
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_a_decoder_that_reads_its_encoders_cache_trains():
    transformers = pytest.importorskip("transformers")
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "global_head_dim": 8, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 4, "patch_size": 4, "position_embedding_size": 16,
    }  # fmt: skip
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=8)
    torch.manual_seed(0)
    model = transformers.DiffusionGemmaForBlockDiffusion(config)

    def step(model):
        model.zero_grad()
        loss = model(input_ids=IDS, decoder_input_ids=IDS[:, :8]).logits.square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    reference = step(copy.deepcopy(model))
    report = apply_activation_checkpointing(model)
    assert {group.blocks[0]: group.applied for group in report.groups if group.part == "language"} == {
        "model.encoder.language_model.layers.0": "sub-modules",
        "model.decoder.layers.0": "full",
    }
    assert all(map(torch.equal, reference, step(model)))


@pytest.mark.parametrize("name", ["MT5", "UMT5"])
def test_decoders_with_a_copy_of_the_config_are_found_from_a_pickled_model_as_well(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    before = [m.config.use_cache for m in model.modules() if hasattr(m, "config")]
    apply_activation_checkpointing(model)
    model = pickle.loads(pickle.dumps(model))
    assert not any(m.config.use_cache for m in model.modules() if hasattr(m, "config"))
    assert model.generation_config.use_cache is not False
    model(input_ids=IDS, labels=IDS).loss.backward()
    remove_activation_checkpointing(model)
    assert [m.config.use_cache for m in model.modules() if hasattr(m, "config")] == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_generation_goes_on_token_by_token_with_its_cache(mode):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    apply_activation_checkpointing(model)
    lengths = []
    model.model.layers[0].register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))
    with mode():
        assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), expected)
    assert lengths == [12, 1, 1, 1]
