"""The table of the guide, measured on an H100, beside what is predicted for it without one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import ac_core

BATCH, SEQUENCE = 8, 2048
_GIB = 2**30


@dataclass(frozen=True)
class Row:
    """published: the guide's figure, in what it calls GB. settings: of `ac_core.estimate`, besides the common ones."""

    name: str
    published: float
    settings: dict[str, Any]


_SHARDED = {"strategy": "fsdp2", "dp_size": 8}
_PIECES = ["*.self_attn", "*.mlp", "*_layernorm"]  # AutoModel's "full": attention, MLP and norms, one by one

# The rows are cumulative: the fourth cannot be the loss alone, with which activations remain.
ROWS = [
    Row("Baseline", 53.03, {"policy": "none"}),
    Row("+ FSDP (dp_size=8)", 47.59, {"policy": "none", **_SHARDED}),
    Row("+ Gradient Checkpointing", 33.06, {"policy": "full", **_SHARDED}),
    Row("+ LC-CE", 7.30, {"policy": "full", "loss": "fused", **_SHARDED}),
    Row("FSDP + LC-CE + Checkpointing", 7.30, {"policy": "full", "loss": "fused", **_SHARDED}),
]

VARIANTS = {
    "as published": {"kernels": "fused", "keep_output": True, "blocks": _PIECES},
    "whole blocks": {"kernels": "fused", "keep_output": True},
    "loss kept alone": {"kernels": "fused"},
    "plain kernels": {},
}
"""Under what the rows are predicted, each without one thing more of what the published figures seem to have."""


def llama_3_2_1b() -> nn.Module:
    """The architecture, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).train()


def predicted(row: Row, variant: dict[str, Any], **changes: Any) -> ac_core.Estimate:
    """What the row needs under a variant of `VARIANTS`."""
    settings = row.settings | (variant if row.settings["policy"] != "none" else {**variant, "blocks": None}) | changes
    return ac_core.estimate(llama_3_2_1b, batch_size=BATCH, sequence_length=SEQUENCE, **settings)


def table(say: Callable[[str], None]) -> str:
    """Markdown. `say` is told of progress."""
    lines = [
        f"| | published | {' | '.join(f'{name}, GiB (GB)' for name in VARIANTS)} |",
        f"|--|--:|{'--:|' * len(VARIANTS)}",
    ]
    for row in ROWS:
        cells = []
        for name, variant in VARIANTS.items():
            peak = predicted(row, variant).peak_bytes
            error = peak / _GIB / row.published - 1
            cells.append(f"{peak / _GIB:.2f} ({peak / 1e9:.2f}) {error:+.1%}")
            say(f"{row.name}, {name}: {cells[-1]}")
        lines.append(f"| {row.name} | {row.published:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)
