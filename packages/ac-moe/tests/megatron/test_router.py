"""A router in a checkpointed region: it routes as in the forward, and counts once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ac_moe_megatron import HIDDEN, block, config, counting, megatron_on_cpu, run
from ac_moe_model import differences
from ac_moe_ranks import Ranks
from torch.utils.checkpoint import checkpoint

import ac_moe


class ByHand(torch.nn.Module):
    """The layers of a block, each in a checkpoint that runs the forward's graph."""

    def __init__(self, layers: torch.nn.ModuleList, **options: Any) -> None:
        super().__init__()
        self.layers, self.options = layers, options

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = checkpoint(self._one, layer, x, attention_mask, use_reentrant=False, **self.options)
        return x

    def _one(self, layer: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        return layer(hidden_states=x, attention_mask=mask)


# ---- counted once


def counted(rank: int, kind: str, schedule: str, balancing: str, enabled: bool) -> list[str]:
    with megatron_on_cpu():
        settings = {"moe_router_load_balancing_type": balancing, "moe_z_loss_coeff": 0.01}
        expected = run(block(config(**settings)), schedule)
        model = block(config("uniform 1" if kind == "megatron" else "no recompute", **settings))
        if kind == "by hand":
            options = {"context_fn": ac_moe.context_fn("combine")} if enabled else {}
            model = ByHand(model.layers, **options)
        if enabled:
            ac_moe.megatron.enable(model, "combine")
        return differences(run(model, schedule), expected)


@pytest.mark.parametrize("schedule", ["f0 b0 f1 b1", "f0 f1 b1 b0"])
@pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("kind", ["megatron", "by hand"])
def test_counters_and_losses_are_those_without_recompute(
    ranks: Ranks, kind: str, balancing: str, schedule: str
) -> None:
    assert ranks.run(counted, kind=kind, schedule=schedule, balancing=balancing, enabled=True) == [[], []]


def test_without_ac_moe_they_are_not(ranks: Ranks) -> None:
    """What the test above is about: it would notice."""
    settings = {"balancing": "global_aux_loss", "enabled": False}
    own = ranks.run(counted, kind="megatron", schedule="f0 f1 b1 b0", **settings)[0]
    assert "layers.0.mlp.router.weight" in own  # the loss saw another average
    by_hand = ranks.run(counted, kind="by hand", schedule="f0 b0 f1 b1", **settings)[0]
    assert {"layers.0.mlp.router.local_tokens_per_expert", "layers.0.mlp.router.ga_steps"} <= {*by_hand}


def graph_of_the_router(rank: int) -> tuple[bool, bool]:
    """The reentrant forward turns gradients on for the router alone, and nothing of its graph leaves it."""
    with megatron_on_cpu():
        model = block(config("uniform 1"))
        ac_moe.megatron.enable(model, "combine")
        router, seen = model.layers[0].mlp.router, []
        router.register_forward_hook(
            lambda module, inputs, outputs: seen.append((torch.is_grad_enabled(), outputs[0].requires_grad))
        )
        run(model, "f0 b0")
        forward, recompute = seen
        return forward == (False, False), recompute == (True, True)


def test_the_forwards_router_leaves_no_graph(ranks: Ranks) -> None:
    assert ranks.run(graph_of_the_router) == [(True, True)] * 2


# ---- routes alike


def noisy(rank: int, where: str, kind: str, noise_on: int | None, check_routing: bool | None = None) -> list[str] | str:
    """A router with noise that no checkpoint replays, before the point that is pinned or behind it."""
    with megatron_on_cpu():
        from megatron.core.transformer.moe.router import TopKRouter

        class Noisy(TopKRouter):
            def noise(self, logits: torch.Tensor) -> torch.Tensor:
                self.calls = getattr(self, "calls", 0) + 1
                noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(self.calls))
                return logits + 3 * noise if noise_on is None or dist.get_rank() == noise_on else logits

            def gating(self, x: torch.Tensor) -> torch.Tensor:
                logits = super().gating(x)
                return self.noise(logits) if where == "gating" else logits

            def routing(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return super().routing(self.noise(logits) if where == "routing" else logits, *args, **kwargs)

        def build(recompute: str) -> torch.nn.Module:
            model = block(config(recompute))
            for layer in model.layers:
                layer.mlp.router.__class__ = Noisy
            return model

        expected = run(build("no recompute"), "f0 b0")
        model = build("uniform 1" if kind == "megatron" else "no recompute")
        if kind == "by hand":
            model = ByHand(model.layers, context_fn=ac_moe.context_fn("combine"))
        ac_moe.megatron.enable(model, "combine", check_routing=check_routing)
        try:
            return differences(run(model, "f0 b0"), expected)
        except ac_moe.RecomputeRoutingMismatchError as error:
            return str(error)


@pytest.mark.parametrize("kind", ["megatron", "by hand"])
def test_noisy_logits_are_pinned(ranks: Ranks, kind: str) -> None:
    assert ranks.run(noisy, where="gating", kind=kind, noise_on=None, check_routing=True) == [[], []]


@pytest.mark.parametrize("kind", ["megatron", "by hand"])
@pytest.mark.parametrize("noise_on", [None, 1], ids=["all ranks", "rank 1"])
def test_a_router_of_the_users_is_checked(ranks: Ranks, kind: str, noise_on: int | None) -> None:
    """Its routing differs behind what is pinned: an error on every rank, also on those that route alike."""
    on_0, on_1 = ranks.run(noisy, where="routing", kind=kind, noise_on=noise_on)
    assert on_0 == on_1
    assert on_0.startswith("layers.1.mlp: ")
    assert f"on rank {'0, 1' if noise_on is None else '1'} of its group" in on_0


def checking(rank: int, check_routing: bool | None) -> int:
    with megatron_on_cpu():
        model = block(config("uniform 1"))
        ac_moe.megatron.enable(model, "combine", check_routing=check_routing)
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
        loss = (model(torch.randn(6, 1, HIDDEN).requires_grad_(), attention_mask=mask) ** 2).sum()
        with counting() as counts:
            loss.backward()
        return counts["all_reduce"]


def test_megatrons_own_routers_are_checked_if_asked(ranks: Ranks) -> None:
    asked, not_asked = ranks.run(checking, check_routing=True), ranks.run(checking, check_routing=None)
    assert [one - other for one, other in zip(asked, not_asked, strict=True)] == [2, 2]  # one number for each layer
