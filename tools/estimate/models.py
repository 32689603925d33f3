"""The models of the comparison: small, and of every kind that training meets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """build: the model in training mode, with random weights. batch: real tensors; floating-point ones in fp32."""

    build: Callable[[], nn.Module]
    batch: Batch


def _text(vocabulary: int, sequence_length: int = 256, batch_size: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (batch_size, sequence_length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _decoder(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 512,
    } | changes


def llama() -> Model:
    """Dense, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_decoder(tie_word_embeddings=True))
    return Model(lambda: LlamaForCausalLM(config).train(), _text(2048))


def packed() -> Model:
    """Three texts a row, which a mask of all pairs of tokens keeps apart."""
    plain = llama()
    tokens = plain.batch["input_ids"]
    positions = (torch.arange(tokens.shape[1]) % 100).repeat(len(tokens), 1)

    def build() -> nn.Module:
        model = plain.build()
        model.config.use_cache = False  # with a cache, restarting positions are not looked at
        return model

    return Model(build, {**plain.batch, "position_ids": positions})


def qwen3() -> Model:
    """Dense, with norms on queries and keys, and a head of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_decoder(head_dim=64, tie_word_embeddings=False))
    return Model(lambda: Qwen3ForCausalLM(config).train(), _text(2048))


def gemma2() -> Model:
    """Dense, norms before and after, capped logits, attention over a window, written out."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**_decoder(head_dim=64, attn_implementation="eager"))
    return Model(lambda: Gemma2ForCausalLM(config).train(), _text(2048))


def gpt2() -> Model:
    """Dense, LayerNorm, dropout everywhere, a key/value cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=2048, n_positions=512)
    return Model(lambda: GPT2LMHeadModel(config).train(), _text(2048))


def t5() -> Model:
    """Encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 256, "d_ff": 512, "d_kv": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 2048}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return Model(lambda: T5ForConditionalGeneration(config).train(), _text(2048))


def qwen3_moe() -> Model:
    """Eight experts, two a token, in grouped products."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = _decoder(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, head_dim=64)
    config = Qwen3MoeConfig(**sizes)
    return Model(lambda: Qwen3MoeForCausalLM(config).train(), _text(2048))


def deepseek_v3() -> Model:
    """Eight experts, two a token, and one that all tokens share; latent attention."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = _decoder(num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    latent = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
    config = DeepseekV3Config(**sizes, **latent, first_k_dense_replace=1, n_group=2, topk_group=1)
    return Model(lambda: DeepseekV3ForCausalLM(config).train(), _text(2048))


def mixtral_loop() -> Model:
    """Four experts, two a token, in a loop over experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_decoder(num_local_experts=4, intermediate_size=512, experts_implementation="eager"))
    return Model(lambda: MixtralForCausalLM(config).train(), _text(2048))


def llava(*, frozen: bool = False) -> Model:
    """A vision tower of its own and a language model, one image a row. frozen: the tower."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, image_size=96, patch_size=8
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**_decoder()), image_token_index=7)
    patches = (96 // 8) ** 2
    batch = _text(2048)
    for tokens in batch.values():
        tokens[tokens == 7] = 8
    batch["input_ids"][:, :patches] = 7
    batch["pixel_values"] = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(2))

    def build() -> nn.Module:
        model = LlavaForConditionalGeneration(config).train()
        if frozen:
            model.model.vision_tower.requires_grad_(requires_grad=False)
        return model

    return Model(build, batch)


def qwen2_5_vl() -> Model:
    """Patches of images in a grid that the model looks at, windows in the tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "hidden_size": 128,
        "out_hidden_size": 256,
        "intermediate_size": 256,
        "depth": 4,
        "num_heads": 4,
        "fullatt_block_indexes": [1, 3],
    }
    text = _decoder(rope_parameters={"rope_type": "default", "mrope_section": [8, 12, 12]})
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, image_token_id=7, vision_start_token_id=5)
    batch = _text(2048)
    for tokens in batch.values():
        tokens[tokens <= 8] = 9
    grid = torch.tensor([[1, 16, 16], [1, 16, 16]])
    rows = int(grid.prod(1).sum())
    batch["input_ids"][:, 0] = 5
    batch["input_ids"][:, 1 : 1 + rows // 8] = 7
    batch["pixel_values"] = torch.randn(rows, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(2))
    batch["image_grid_thw"] = grid
    batch["mm_token_type_ids"] = (batch["input_ids"] == 7).long()
    return Model(lambda: Qwen2_5_VLForConditionalGeneration(config).train(), batch)


def smolvlm() -> Model:
    """Two images a row, of which the model drops those that are padding: none here."""
    from transformers import LlamaConfig, SmolVLMConfig, SmolVLMForConditionalGeneration

    vision = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 8,
    }
    config = SmolVLMConfig(
        vision_config=vision, text_config=LlamaConfig(**_decoder()), scale_factor=2, image_token_id=7
    )
    images = 2
    tokens = images * (64 // 8 // 2) ** 2
    batch = _text(2048)
    for row in batch.values():
        row[row == 7] = 8
    batch["input_ids"][:, :tokens] = 7
    batch["pixel_values"] = torch.randn(2, images, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    return Model(lambda: SmolVLMForConditionalGeneration(config).train(), batch)


class _LoRALinear(nn.Module):
    """A frozen linear beside a low-rank product that learns."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = linear.requires_grad_(requires_grad=False)
        dtype = linear.weight.dtype
        self.down = nn.Linear(linear.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, linear.out_features, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


def llama_lora() -> Model:
    """Frozen, with low-rank adapters on the projections of attention."""
    plain = llama()

    def build() -> nn.Module:
        model = plain.build().requires_grad_(requires_grad=False)
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, _LoRALinear(getattr(layer.self_attn, name), rank=8))
        return model

    return Model(build, plain.batch)
