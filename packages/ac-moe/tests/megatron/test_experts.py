"""`TorchGroupedExperts` computes and saves what Megatron's own experts do."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ac_moe_megatron import EXPERTS, HIDDEN, WIDE, block, config, megatron_on_cpu
from ac_moe_ranks import Ranks

import ac_moe

LOCAL = EXPERTS // 2


def layer(settings: dict[str, Any], experts: Any = None) -> Any:
    return block(config(**settings), experts).layers[0].mlp


def copy_weights(source: Any, into: Any) -> None:
    """From sequential experts to grouped ones."""
    with torch.no_grad():
        for number, expert in enumerate(source.experts.local_experts):
            into.experts.weight1[number] = expert.linear_fc1.weight
            into.experts.weight2[number] = expert.linear_fc2.weight
        into.router.load_state_dict(source.router.state_dict())


def as_sequential(rank: int, settings: dict[str, Any]) -> float:
    """The largest difference in output and gradients, in units of the largest value."""
    with megatron_on_cpu():
        theirs, ours = layer(settings, "sequential"), layer(settings)
        copy_weights(theirs, ours)
        results = []
        for model in (theirs, ours):
            x = torch.randn(6, 2, HIDDEN, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            y, bias = model(x)
            assert bias is None
            (y**2).sum().backward()
            results.append([y, x.grad, model.router.weight.grad])
        experts = theirs.experts.local_experts
        results[0] += [torch.stack([getattr(expert, name).weight.grad for expert in experts]) for name in _LINEARS]
        results[1] += [ours.experts.weight1.grad, ours.experts.weight2.grad]
        return max(((one - other).abs().max() / other.abs().max()).item() for one, other in zip(*results, strict=True))


_LINEARS = ("linear_fc1", "linear_fc2")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation_func": torch.nn.functional.gelu},
        {"gated_linear_unit": False, "activation_func": torch.nn.functional.relu},
        {"activation_func_clamp_value": 0.5},
        {"glu_linear_offset": 1.0},
        {"moe_ffn_hidden_size": WIDE + 3},  # no multiple of 16 bytes
    ],
    ids=["swiglu", "geglu", "no gate", "clamped", "offset", "odd width"],
)
def test_computes_what_sequential_experts_do(ranks: Ranks, settings: dict[str, Any]) -> None:
    assert max(ranks.run(as_sequential, settings=settings)) < 1e-5


def weights(rank: int) -> list[torch.Tensor]:
    with megatron_on_cpu():
        experts = layer({"moe_latent_size": None}).experts
        assert [weight.allreduce for weight in experts.parameters()] == [False, False]
        experts.backward_dw()
        return [weight.detach() for weight in experts.parameters()]


def test_ranks_have_different_experts(ranks: Ranks) -> None:
    for on_0, on_1 in zip(*ranks.run(weights), strict=True):
        each = [*on_0, *on_1]
        assert len({weight.sum().item() for weight in each}) == EXPERTS
        assert all(0.05 < weight.std() < 0.5 for weight in each)


# ---- distributed checkpoints


def pieces(rank: int, experts: str | None) -> dict[str, list[tuple[Any, ...]]]:
    """What is saved under each key: where, of what whole, and the values."""
    with megatron_on_cpu():
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

        theirs = layer({}, "sequential")
        model = theirs
        if experts is None:
            model = layer({})
            copy_weights(theirs, model)
        state = model.experts.sharded_state_dict("experts.")
        apply_factories(state)
        found: dict[str, list[tuple[Any, ...]]] = {}
        waiting = [value for value in state.values() if not isinstance(value, ShardedObject)]  # empty extra states
        while waiting:
            value = waiting.pop()
            if not isinstance(value, ShardedTensor):
                waiting += value.values() if isinstance(value, dict) else value
                continue
            whole = (value.global_shape, value.dtype, value.replica_id)
            data = value.data[(None,) * value.prepend_axis_num] if value.prepend_axis_num else value.data
            found.setdefault(value.key, []).append((value.global_offset, *whole, data.detach()))
        return found


def assembled(on_ranks: list[dict[str, list[tuple[Any, ...]]]]) -> dict[str, tuple[torch.Tensor, Any]]:
    wholes: dict[str, tuple[torch.Tensor, Any]] = {}
    for found in on_ranks:
        for key, parts in found.items():
            for offset, shape, dtype, replica, data in parts:
                whole, _ = wholes.setdefault(key, (torch.full(shape, float("nan"), dtype=dtype), replica))
                whole[tuple(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True))] = data
    return wholes


def test_saves_what_sequential_experts_save(ranks: Ranks) -> None:
    theirs, ours = assembled(ranks.run(pieces, experts="sequential")), assembled(ranks.run(pieces, experts=None))
    assert ours.keys() == theirs.keys() == {"experts.experts.linear_fc1.weight", "experts.experts.linear_fc2.weight"}
    for key, (whole, replica) in ours.items():
        assert torch.equal(whole, theirs[key][0])  # no NaN: all of it is there
        assert replica == theirs[key][1]


def one_key_each(rank: int) -> str:
    with megatron_on_cpu():
        with pytest.raises(ValueError, match="singleton") as caught:
            layer({}).experts.sharded_state_dict(metadata={"singleton_local_shards": True})
        return str(caught.value)


def test_a_key_for_each_expert_is_refused(ranks: Ranks) -> None:
    assert "save with singleton_local_shards=False" in ranks.run(one_key_each)[0]


# ---- refusals


def refused(rank: int, settings: dict[str, Any]) -> list[str]:
    with megatron_on_cpu():
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        configuration = config()
        for name, value in settings.items():
            setattr(configuration, name, value)
        with pytest.raises(ValueError, match=r"\w") as caught:
            ac_moe.megatron.TorchGroupedExperts(LOCAL, configuration, get_default_pg_collection())
        return [line.split(":")[0] for line in str(caught.value).split("\n")]


def test_settings_that_are_not_done_are_refused_all_at_once(ranks: Ranks) -> None:
    settings = {
        "add_bias_linear": True,
        "fp8": "hybrid",
        "moe_apply_probs_on_input": True,
        "use_te_activation_func": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    }
    names = ["add_bias_linear", "fp8, fp4", "moe_apply_probs_on_input", "use_te_activation_func", "recompute_modules"]
    assert ranks.run(refused, settings=settings) == [names] * 2


def no_groups(rank: int) -> None:
    with megatron_on_cpu(), pytest.raises(ValueError, match="pg_collection: None"):
        ac_moe.megatron.TorchGroupedExperts(LOCAL, config(), None)
    assert dist.is_initialized()


def test_needs_its_groups(ranks: Ranks) -> None:
    ranks.run(no_groups)
