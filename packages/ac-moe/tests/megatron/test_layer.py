"""What a call leaves behind: nothing."""

import gc
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from ac_moe_megatron import DISPATCHERS, HIDDEN, block, config, megatron_on_cpu, run
from ac_moe_ranks import Ranks
from torch.utils.checkpoint import checkpoint

import ac_moe


def input_of_numpy() -> tuple[torch.Tensor, weakref.ref]:
    """An input, and a reference that dies with its memory, whichever tensors share it."""
    array = np.random.default_rng(0).standard_normal((6, 1, HIDDEN), dtype=np.float32)
    return torch.from_numpy(array).requires_grad_(), weakref.ref(array)


def input_lives(rank: int, dispatcher: str, recompute: str, enabled: bool) -> bool:
    with megatron_on_cpu():
        model = block(config(recompute, dispatcher))
        if enabled:
            ac_moe.megatron.enable(model, "combine")
        settings = {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)}
        if recompute == "moe":  # it is the input of the MoE layer that is checkpointed
            model, settings = model.layers[0].mlp, {}
        gc.disable()
        try:
            x, memory = input_of_numpy()
            output = model(x, **settings)
            loss = (output**2 if isinstance(output, torch.Tensor) else output[0] ** 2).sum()
            del output
            loss.backward()
            assert memory() is not None
            del x, loss
            return memory() is not None
        finally:
            gc.enable()


@pytest.mark.parametrize("recompute", ["uniform 1", "uniform 2", "block 1", "moe"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_no_checkpoint_input_outlives_the_backward(ranks: Ranks, dispatcher: str, recompute: str) -> None:
    assert ranks.run(input_lives, dispatcher=dispatcher, recompute=recompute, enabled=True) == [False, False]


@pytest.mark.parametrize("recompute", ["uniform 2", "moe"])
def test_without_ac_moe_it_does(ranks: Ranks, recompute: str) -> None:
    assert ranks.run(input_lives, dispatcher="flex", recompute=recompute, enabled=False) == [True, True]


def state_after(rank: int, ends: str) -> set[str]:
    """Tensors that the HybridEP manager has got by a call that ended otherwise than by returning."""
    with megatron_on_cpu():
        model = block(config(hidden_dropout=0.0))
        layer = model.layers[0].mlp
        manager = vars(layer.token_dispatcher._comm_manager)
        ac_moe.megatron.enable(model, "combine")
        before = {name for name, value in manager.items() if isinstance(value, torch.Tensor)}
        x = torch.randn(6, 1, HIDDEN).requires_grad_()
        if ends == "by an error":
            with mock.patch.object(layer.experts, "weight2", None), pytest.raises(AttributeError):
                layer(x)
        else:
            checkpoint(
                lambda x: x + layer(x)[0], x, use_reentrant=False, context_fn=ac_moe.context_fn("combine")
            ).sum().backward()
        assert manager["handle"] is None
        return {name for name, value in manager.items() if isinstance(value, torch.Tensor)} - before


@pytest.mark.parametrize("ends", ["by an error", "by early stop"])
def test_a_call_that_does_not_return_is_forgotten(ranks: Ranks, ends: str) -> None:
    assert ranks.run(state_after, ends=ends) == [set(), set()]


def tail_without_checkpoint(rank: int) -> tuple[str, tuple[str, ...]]:
    with megatron_on_cpu():
        model = block(config())
        ac_moe.megatron.enable(model, "moe_tail")
        with torch.no_grad():
            model.layers[0].mlp(torch.randn(6, 1, HIDDEN))
        model.eval()
        run_forward = model.layers[0].mlp(torch.randn(6, 1, HIDDEN).requires_grad_())[0]
        assert torch.isfinite(run_forward).all()
        model.train()
        with pytest.raises(ac_moe.MoETailError) as caught:
            run(model, "f0 b0")
        return str(caught.value).split("\n")[1], caught.value.unmet


def test_moe_tail_without_a_checkpoint_is_refused_in_the_first_forward(ranks: Ranks) -> None:
    (where, unmet), _ = ranks.run(tail_without_checkpoint)
    assert where == "layers.0.mlp:"
    assert [text.split(":")[0] for text in unmet] == ["activation checkpointing is off"]


def held_graph(rank: int) -> list[int]:
    with megatron_on_cpu():
        model = block(config("uniform 1"))
        ac_moe.megatron.enable(model, "combine")
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
        loss = (model(torch.randn(6, 1, HIDDEN).requires_grad_(), attention_mask=mask) ** 2).sum()
        loss.backward(retain_graph=True)
        first = [parameter.grad.clone() for parameter in model.parameters()]
        live = [ac_moe.stats().live_entries]
        model.zero_grad()
        loss.backward()
        live.append(ac_moe.stats().live_entries)
        assert all(torch.equal(one, other.grad) for one, other in zip(first, model.parameters(), strict=True))
        return live


def test_twice_with_a_retained_graph(ranks: Ranks) -> None:
    assert ranks.run(held_graph) == [[2, 0]] * 2
