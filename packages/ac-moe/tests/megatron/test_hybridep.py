"""HybridEP's own traps: another layout in the recompute, sizes left over, ranks and experts with few tokens."""

from typing import Any
from unittest import mock

import pytest
import torch
from ac_moe_megatron import HIDDEN, RECOMPUTE, block, config, megatron_on_cpu, run
from ac_moe_model import differences
from ac_moe_ranks import Ranks
from torch.utils.checkpoint import checkpoint

import ac_moe


class ByHand(torch.nn.Module):
    """Layers that save nothing after the combine, each in a checkpoint that early stop ends before it."""

    def __init__(self, layers: torch.nn.ModuleList, **options: Any) -> None:
        super().__init__()
        self.layers, self.options = layers, options

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = checkpoint(self._one, layer, x, attention_mask, use_reentrant=False, **self.options)
        return x

    def _one(self, layer: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        return layer(hidden_states=x, attention_mask=mask)


def other_layout(rank: int, kind: str, mode: str, enabled: bool) -> list[str]:
    """A buffer that puts the rows of an expert in another order after the two dispatches of a forward."""
    with megatron_on_cpu():
        from megatron.core.transformer.moe import fused_a2a

        class Shuffling(ac_moe.reference.HybridEPBuffer):
            layouts = 0

            def _permutation(self, layout: Any, pad_multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
                places, counts = super()._permutation(layout, pad_multiple)
                Shuffling.layouts += 1
                if Shuffling.layouts <= 2:
                    return places, counts
                ends = counts.cumsum(0)
                turned = (ends - counts) + ends - 1 - places  # each expert's block backwards
                return torch.where(places >= 0, turned, -1), counts

        def train(model: torch.nn.Module) -> dict[str, torch.Tensor]:
            Shuffling.layouts = 0
            with (
                mock.patch.object(fused_a2a, "HybridEPBuffer", Shuffling),
                mock.patch.object(fused_a2a, "_hybrid_ep_buffer", None),
            ):
                return run(model, "f0 b0")

        expected = train(block(config()))
        model = block(config("uniform 1" if kind == "megatron" else "no recompute"))
        if kind == "by hand":
            options = {"context_fn": ac_moe.context_fn(mode, pin_routing=True)} if enabled else {}
            model = ByHand(model.layers, **options)
        if enabled:
            ac_moe.megatron.enable(model, mode)
        return differences(train(model), expected)


@pytest.mark.parametrize("mode", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("kind", ["megatron", "by hand"])
def test_the_recompute_has_the_forwards_layout(ranks: Ranks, kind: str, mode: str) -> None:
    assert ranks.run(other_layout, kind=kind, mode=mode, enabled=True) == [[], []]


def test_without_ac_moe_another_layout_changes_gradients(ranks: Ranks) -> None:
    assert "layers.0.mlp.experts.weight1" in ranks.run(other_layout, kind="by hand", mode="none", enabled=False)[0]


def left_over(rank: int, enabled: str) -> list[int | None]:
    """The sizes that dispatches of the second forward were given, after an early-stopped recompute."""
    with megatron_on_cpu():
        sizes = []
        model = block(config(hidden_dropout=0.0))
        if enabled == "before":
            ac_moe.megatron.enable(model, "combine")
            model = ByHand(model.layers, context_fn=ac_moe.context_fn("combine"))
        else:
            model = ByHand(model.layers)
        run(model, "f0 b0")
        if enabled == "after":
            ac_moe.megatron.enable(model, "combine")
        dispatch = ac_moe.reference.HybridEPBuffer.dispatch_with_permute

        def noting(buffer: Any, **arguments: Any) -> Any:
            size = arguments["num_permuted_tokens"]
            sizes.append(size if size is None else int(size))
            return dispatch(buffer, **arguments)

        with mock.patch.object(ac_moe.reference.HybridEPBuffer, "dispatch_with_permute", noting), torch.no_grad():
            model(torch.randn(4, 1, HIDDEN), attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1))
        return sizes


def test_no_size_is_left_over_from_an_early_stopped_recompute(ranks: Ranks) -> None:
    stock = ranks.run(left_over, enabled="never")
    assert all(size is not None for sizes in stock for size in sizes)  # Megatron's defect
    assert ranks.run(left_over, enabled="before") == [[None, None]] * 2
    assert ranks.run(left_over, enabled="after") == [[None, None]] * 2


def uneven(rank: int, recompute: str, mode: str, tokens: tuple[int, int], favoured: int | None) -> list[str]:
    def build(recompute: str) -> torch.nn.Module:
        model = block(config(recompute))
        for layer in model.layers if favoured is not None else ():
            layer.mlp.router.expert_bias[favoured : favoured + 2] = 100.0  # top 2: all tokens to these
        return model

    with megatron_on_cpu():
        expected = run(build("no recompute"), sequence=tokens[rank])
        model = build(recompute)
        ac_moe.megatron.enable(model, mode)
        return differences(run(model, sequence=tokens[rank]), expected)


@pytest.mark.parametrize("mode", ["combine", "moe_tail"])
@pytest.mark.parametrize("recompute", [name for name in RECOMPUTE if name != "no recompute"])
@pytest.mark.parametrize(
    ("tokens", "favoured"), [((5, 8), None), ((6, 6), 2)], ids=["other counts", "a rank without rows"]
)
def test_uneven_ranks(ranks: Ranks, recompute: str, mode: str, tokens: tuple[int, int], favoured: int | None) -> None:
    assert ranks.run(uneven, recompute=recompute, mode=mode, tokens=tokens, favoured=favoured) == [[], []]
