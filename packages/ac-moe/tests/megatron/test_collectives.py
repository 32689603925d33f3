"""What the exchange of an all-to-all dispatcher holds until the backward."""

from unittest import mock

import torch
from ac_moe_megatron import HIDDEN, block, config, megatron_on_cpu
from ac_moe_model import differences
from ac_moe_ranks import Ranks

import ac_moe


def held(rank: int) -> tuple[set[torch.dtype], list[str]]:
    """Dtypes of tensors that an exchange holds; what is replaced in its copy of the dispatcher."""
    with megatron_on_cpu():
        from ac_moe.megatron.collectives import AllToAllSumExchange
        from ac_moe.megatron.replacement import Replacement

        made, of = [], AllToAllSumExchange.of
        layer = block(config("moe", "alltoall")).layers[0].mlp
        ac_moe.megatron.enable(layer, "combine")
        with mock.patch.object(AllToAllSumExchange, "of", lambda *arguments: made.append(of(*arguments)) or made[-1]):
            layer(torch.randn(6, 1, HIDDEN).requires_grad_())
        state = vars(made[0].dispatcher)
        dtypes = {value.dtype for value in state.values() if isinstance(value, torch.Tensor)}
        return dtypes, [name for name, value in state.items() if isinstance(value, Replacement)]


def test_an_exchange_holds_routing_and_no_activation(ranks: Ranks) -> None:
    assert ranks.run(held) == [({torch.int64, torch.bool}, [])] * 2


def with_capacity(rank: int) -> list[str]:
    """Megatron's other way to permute: each expert takes a fixed number of rows of each rank."""
    settings = {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_token_drop_policy": "probs",
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
    }

    def train(recompute: str, enabled: bool) -> dict[str, torch.Tensor]:
        layer = block(config(recompute, "alltoall", **settings)).layers[0].mlp
        if enabled:
            ac_moe.megatron.enable(layer, "combine")
        x = torch.randn(6, 2, HIDDEN, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        (layer(x)[0] ** 2).sum().backward()
        return {"x": x.grad} | {name: parameter.grad for name, parameter in layer.named_parameters()}

    with megatron_on_cpu():
        return differences(train("moe", True), train("no recompute", False))


def test_padded_to_capacity(ranks: Ranks) -> None:
    assert ranks.run(with_capacity) == [[], []]
