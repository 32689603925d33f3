"""Blocks compiled one by one under FSDP2: each order that can work does, with the recompute that the policy says."""

from collections.abc import Callable

import pytest
import torch
from ac_core_cases import sharded
from ac_core_decoder import VOCABULARY, Decoder
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from ac_core import apply_activation_checkpointing

ORDERS = ("checkpoint, compile, shard", "checkpoint, shard, compile", "compile, checkpoint, shard")


def train(rank: int, order: str) -> dict[str, tuple[bool, int]]:
    """For each policy: whether the numbers of two steps are those without; the matmuls of the compiled backwards."""
    results, expected = {}, None
    for policy in ("none", "full", "selective"):
        torch._dynamo.reset()
        backwards: list[int] = []
        model = Decoder(depth=2)
        actions = {
            "checkpoint": lambda model=model, policy=policy: apply_activation_checkpointing(model, policy),
            "compile": lambda model=model, backwards=backwards: _compile(model.layers, backwards),
            "shard": lambda model=model: sharded(model),
        }
        for action in order.split(", "):
            actions[action]()
        numbers = _steps(model, rank)
        expected = expected or numbers
        results[policy] = all(map(torch.equal, numbers, expected)), sum(backwards)
    return results


def _compile(layers: nn.ModuleList, backwards: list[int]) -> None:
    def backward(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        backwards.append(sum(str(node.target).startswith("aten.mm") for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    for layer in layers:
        layer.compile(backend=backend)


def _steps(model: Decoder, rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    numbers = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = model(*torch.randint(VOCABULARY, (2, 2, 8)))
        loss.backward()
        numbers += [loss.detach(), *(parameter.grad.to_local().clone() for parameter in model.parameters())]
    return numbers


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_that_works(ranks, order):
    for result in ranks.run(train, order=order):
        assert [same for same, _ in result.values()] == [True, True, True]
        none, full, selective = (matmuls for _, matmuls in result.values())
        assert (none, full) == (14, 20)  # of seven products; the last is not needed again
        assert none < selective < full
