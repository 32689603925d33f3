"""The fused loss against the model's own, over architectures with every kind of head and of loss."""

import pytest
import torch

from ac_loss.huggingface import LazyLogits, remove_fused_loss, use_fused_loss

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "attention_dropout": 0.0,
}
TEXT = {
    "vocab_size": 151,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LANGUAGE = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
    "Phi3ForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "GPTNeoXForCausalLM": {},
    "GPT2LMHeadModel": {},  # tied
    "OPTForCausalLM": {},
    "BloomForCausalLM": {},
    "FalconForCausalLM": {},
    "MambaForCausalLM": {},
    # A bias
    "PhiForCausalLM": {},
    "GPTJForCausalLM": {},
    "BertLMHeadModel": {"is_decoder": True},
    # A scale, a softcap
    "CohereForCausalLM": {"logit_scale": 0.3},
    "Cohere2ForCausalLM": {"logit_scale": 0.3},
    "GraniteForCausalLM": {"logits_scaling": 3.0},
    "FalconH1ForCausalLM": {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "Gemma2ForCausalLM": {"final_logit_softcapping": 2.0},
    "RecurrentGemmaForCausalLM": {
        "logits_soft_cap": 2.0,
        "lru_width": 32,
        "attention_window_size": 8,
        "use_cache": False,
    },
    # Mixtures of experts, with their auxiliary loss where they have one
    "MixtralForCausalLM": {"output_router_logits": True},
    "Qwen3MoeForCausalLM": {"output_router_logits": True},
    "OlmoeForCausalLM": {"output_router_logits": True},
    "GptOssForCausalLM": {"output_router_logits": True},
    "GraniteMoeForCausalLM": {"output_router_logits": True, "logits_scaling": 3.0},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 4},
    # Encoder and decoder
    "T5ForConditionalGeneration": {},
    "BartForConditionalGeneration": {},  # adds a buffer
    "MarianMTModel": {"decoder_vocab_size": 151},
    "FSMTForConditionalGeneration": {},  # its output embeddings are the input embeddings
    "ProphetNetForConditionalGeneration": {"ngram": 2},  # log_softmax and nll_loss
    "XLMWithLMHeadModel": {},  # the loss inside of the head
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_text(name, build, text, step):
    model = build(name, **LANGUAGE[name])
    _check(model, text(model), step)


def _whisper(build, text):
    model = build("WhisperForConditionalGeneration", num_mel_bins=8, max_source_positions=16, max_target_positions=64)
    inputs = text(model)
    return model, {"input_features": torch.randn(3, 8, 32), **{k: v for k, v in inputs.items() if k != "input_ids"}}


def _with_image(build, text, name, tokens, words, **settings):
    """The first `tokens` of every row stand for an image."""
    model = build(name, image_token_id=8, image_token_index=8, text_config=TEXT | words, **settings)
    inputs = text(model)
    inputs["input_ids"][:, 1 : 1 + tokens] = 8
    inputs["labels"][:, 1 : 1 + tokens] = -100
    return model, inputs


def _llava(build, text):
    vision = VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
    model, inputs = _with_image(
        build, text, "LlavaForConditionalGeneration", 4, vision_config=vision, words={"model_type": "llama"}
    )
    return model, inputs | {"pixel_values": torch.randn(3, 3, 16, 16)}


def _gemma3(build, text):
    vision = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
    model, inputs = _with_image(
        build,
        text,
        "Gemma3ForConditionalGeneration",
        4,
        vision_config=vision,
        mm_tokens_per_image=4,
        words={"final_logit_softcapping": 2.0},
    )
    types = (inputs["input_ids"] == 8).long()
    return model, inputs | {"pixel_values": torch.randn(3, 3, 16, 16), "token_type_ids": types}


def _qwen2_vl(build, text):
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
    model, inputs = _with_image(
        build,
        text,
        "Qwen2VLForConditionalGeneration",
        4,
        vision_config=vision,
        words={"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    )
    types = (inputs["input_ids"] == 8).long()
    patches = torch.randn(3 * 16, 3 * 2 * 4 * 4)
    grid = torch.tensor([[1, 4, 4]] * 3)
    return model, inputs | {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}


def _blip(build, text):
    words = {"num_attention_heads": 4, "encoder_hidden_size": 32, "bos_token_id": 1, "sep_token_id": 2}
    model = build(
        "BlipForConditionalGeneration",
        vision_config=VISION,
        text_config=TEXT | words,
        projection_dim=32,
        image_text_hidden_size=32,
    )
    return model, text(model) | {"pixel_values": torch.randn(3, 3, 16, 16)}


@pytest.mark.parametrize("make", [_whisper, _llava, _gemma3, _qwen2_vl, _blip], ids=lambda make: make.__name__[1:])
def test_image_and_sound(make, build, text, step):
    torch.manual_seed(2)
    _check(*make(build, text), step)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "CohereForCausalLM", "BartForConditionalGeneration"])
def test_float64_is_equal_to_rounding(name, build, text, step):
    def shifted(logits, labels, vocab_size, **_):  # transformers' own rounds to fp32
        return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))

    model = build(name).double()
    model.loss_function = shifted
    _check(model, text(model), step, loss=1e-14, gradients=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM"])
def test_narrow_dtypes(name, dtype, build, text, step):
    # The model rounds its logits, and what it does to them, to `dtype` before its loss upcasts them: the fused loss
    # upcasts first, and both are as far from the truth as that rounding.
    model = build(name).to(dtype)
    eps = torch.finfo(dtype).eps
    _check(model, text(model), step, loss=eps, gradients=16 * eps)


def _check(model, inputs, step, **tolerance):
    expected = step(model, inputs)
    assert expected.logits_seen
    assert expected.loss.isfinite()
    report = use_fused_loss(model)
    fused = step(model, inputs)
    fused.assert_equal(expected, **tolerance)
    assert not fused.logits_seen
    assert "fused" in str(report)
    assert type(getattr(fused.output, "logits", None)) in (LazyLogits, type(None))
    model.eval()
    with torch.no_grad():
        assert type(getattr(model(**inputs), "logits", torch.empty(0))) is torch.Tensor
    remove_fused_loss(model)
    again = step(model.train(), inputs)
    assert torch.equal(again.loss, expected.loss)
