"""The README's snippet for Megatron-core runs."""

import re
from pathlib import Path

import torch
from ac_moe_megatron import HIDDEN, block, config, megatron_on_cpu
from ac_moe_ranks import Ranks

import ac_moe

README = (Path(__file__).parents[2] / "README.md").read_text()
(SNIPPET,) = re.findall(r"^```py\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def snippet(rank: int) -> tuple[int, int]:
    with megatron_on_cpu():
        ac_moe.reset_stats()
        names = {
            "model": block(config("uniform 1")),
            "hidden_states": torch.randn(6, 1, HIDDEN).requires_grad_(),
            "attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1),
        }
        exec(SNIPPET, names)
        return ac_moe.stats().served, ac_moe.stats().gemms_skipped


def test_snippet(ranks: Ranks) -> None:
    assert ranks.run(snippet) == [(2, 2)] * 2
