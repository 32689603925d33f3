"""Hugging Face models: blocks by their own declaration, towers, the cache, and their own checkpointing beside ours."""

import copy
import pickle

import pytest
import torch

from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    apply_activation_checkpointing,
    find_blocks,
    remove_activation_checkpointing,
)

transformers = pytest.importorskip("transformers", reason="ac-core alone does not need transformers")

SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
TEXT = {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 2}


def llama(**fields):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, **fields}))


def mt5():
    torch.manual_seed(0)
    config = transformers.MT5Config(
        vocab_size=128, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.1,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.MT5ForConditionalGeneration(config)


def mixtral():
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, num_local_experts=4))


def llava():
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    text = transformers.LlamaConfig(**TEXT)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=5)
    )


def whisper():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, pad_token_id=0,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def step(model):
    torch.manual_seed(7)
    model.train().zero_grad(set_to_none=True)
    ids = torch.arange(24).reshape(2, 12) % 100 + 3
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(left, right):
    assert torch.equal(left[0], right[0])
    assert left[1].keys() == right[1].keys()
    assert [n for n in left[1] if not torch.equal(left[1][n], right[1][n])] == []


def parts(model):
    return {block.name.rsplit(".", 1)[0]: block.part for block in find_blocks(model)}


@pytest.mark.parametrize("build", [llama, mt5, mixtral], ids=lambda f: f.__name__)
def test_full_is_bit_equal_with_the_cache_on_by_default(build):
    model = build()
    reference = step(copy.deepcopy(model))
    report = apply_activation_checkpointing(model)
    assert len(report.applied_blocks) == len(find_blocks(model)) > 0
    assert_same(reference, step(model))


@pytest.mark.parametrize("build", [llama, mt5], ids=lambda f: f.__name__)
def test_the_cache_is_off_on_every_config_and_back_on_after_remove(build):
    model = build()
    before = [m.config.use_cache for m in model.modules() if hasattr(m, "config")]
    assert any(before)
    report = apply_activation_checkpointing(model)
    assert not any(m.config.use_cache for m in model.modules() if hasattr(m, "config"))
    assert "use_cache=False" in report.notes[0]
    remove_activation_checkpointing(model)
    assert [m.config.use_cache for m in model.modules() if hasattr(m, "config")] == before


def test_what_was_applied_to_a_wrapper_comes_off_the_model_inside():
    model = llama()
    apply_activation_checkpointing(torch.nn.Sequential(torch.nn.Sequential(model)))
    assert not model.config.use_cache
    remove_activation_checkpointing(model)
    assert model.config.use_cache
    assert "forward" not in vars(model.model.layers[0])


def test_a_cache_that_is_passed_in_is_an_error():
    model = llama()
    apply_activation_checkpointing(model)
    ids = torch.arange(12).reshape(1, 12)
    with pytest.raises(ActivationCheckpointingError, match=r"'model\.layers\.0' was given a key/value cache"):
        model(input_ids=ids, use_cache=True)
    with torch.no_grad():
        assert model(input_ids=ids, use_cache=True).past_key_values is not None


def test_generation_still_works():
    model = llama(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    ids = torch.arange(5).reshape(1, 5) + 3
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    apply_activation_checkpointing(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_towers_are_told_apart():
    assert parts(llava()) == {
        "model.vision_tower.encoder.layers": "vision",
        "model": "connector",  # multi_modal_projector
        "model.language_model.layers": "language",
    }
    assert parts(whisper()) == {"model.encoder.layers": "audio", "model.decoder.layers": "language"}


def test_scope_language_leaves_the_vision_tower_alone():
    report = apply_activation_checkpointing(llava(), scope="language")
    assert {name.split(".")[1] for name in report.applied_blocks} == {"language_model"}


def test_hugging_faces_own_checkpointing_is_detected_before_and_after():
    model = llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(ActivationCheckpointingError, match="already checkpointed by Hugging Face"):
        apply_activation_checkpointing(model)
    model.gradient_checkpointing_disable()
    apply_activation_checkpointing(model)
    model.gradient_checkpointing_enable()
    with pytest.raises(ActivationCheckpointingError, match="gradient_checkpointing_disable"):
        step(model)


def test_attention_dropout_is_seen_without_preserved_random_numbers():
    model = llama(attention_dropout=0.1)
    apply_activation_checkpointing(model, ActivationCheckpointingConfig(preserve_rng_state=False))
    with pytest.raises(ActivationCheckpointingError, match="draws random numbers"):
        step(model)


def test_a_cache_passed_by_position_is_an_error_too():
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128))
    apply_activation_checkpointing(model)
    ids = torch.arange(12).reshape(1, 12)
    with pytest.raises(ActivationCheckpointingError, match="key/value cache"):
        model(input_ids=ids, labels=ids, past_key_values=transformers.DynamicCache())


def test_a_model_pickles_and_goes_on(tmp_path):
    model = llama()
    apply_activation_checkpointing(model)
    assert_same(step(model), step(pickle.loads(pickle.dumps(model))))
    model.save_pretrained(tmp_path)
    reloaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reloaded.parameters(), strict=True))


def test_frozen_embeddings_and_adapters_need_no_hook():
    model = llama()
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.requires_grad_(True)
    reference = step(copy.deepcopy(model))
    apply_activation_checkpointing(model)
    assert_same(reference, step(model))
    assert len(reference[1]) == 3
