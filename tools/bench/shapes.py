"""The model that every variant runs: a Llama of eight blocks, at three sizes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama and its batch. Half as many key/value heads as heads, a feed-forward of three times the width, fp32.

    steps: training steps that one timed round of a variant runs, so that a round is long against the clock.
    """

    hidden_size: int
    sequence_length: int
    heads: int
    batch_size: int = 2
    blocks: int = 8
    vocab_size: int = 2048
    steps: int


SHAPES = {
    "d512": Shape(hidden_size=512, sequence_length=512, heads=8, steps=1),
    "d256": Shape(hidden_size=256, sequence_length=256, heads=4, steps=3),
    # The arithmetic is next to nothing here: what is left is what the host does to launch it, as beside a fast GPU.
    "d64": Shape(hidden_size=64, sequence_length=8, heads=4, steps=20),
}


def build_model(shape: Shape) -> nn.Module:
    """The model in training mode, with the same random weights at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.sequence_length,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def build_batch(shape: Shape) -> dict[str, Tensor]:
    """Random tokens: `input_ids` and `labels`, int64 of `[batch_size, sequence_length]`."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab_size, (shape.batch_size, shape.sequence_length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}
