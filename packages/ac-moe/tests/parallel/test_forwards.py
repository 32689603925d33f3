"""What experts compute, in each way that transformers describes them, and what of a router is pinned."""

import ac_moe_hf as hf
import pytest
import torch
from ac_moe_ranks import Ranks
from torch import nn

import ac_moe
from ac_moe.parallel.discovery import find_experts
from ac_moe.parallel.forwards import RouterForward

EXACT = 1e-12  # float64
DESCRIPTIONS = [
    {},
    {"has_gate": False},
    {"is_transposed": True},
    {"has_bias": True},
    {"has_bias": True, "is_transposed": True, "has_gate": False},
    {"has_post_expert_norm": True},
]


def described(rank: int, description: dict[str, bool]) -> float:
    expected = hf.one_process(hf.StandIn(**description).double())
    model = hf.StandIn(**description).double()
    sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="combine")
    hf.checkpoint_layers(model, sharded.context_fn)
    hf.loss_of(model, hf.batch(rank)).backward()
    hf.average_dense_gradients(model)
    return hf.furthest(hf.gradients(model), expected)


@pytest.mark.parametrize("description", DESCRIPTIONS, ids=lambda it: ", ".join(it) or "plain")
def test_experts_as_described(ranks: Ranks, description: dict[str, bool]) -> None:
    assert max(ranks.run(described, description=description)) < EXACT


def compiled(rank: int) -> list[str]:
    """MoE blocks compiled, checkpoints around them."""
    found = []
    for way in ("plain", "compiled"):
        model = hf.StandIn()
        sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="moe_tail")
        for layer in model.layers if way == "compiled" else ():
            layer.forward = torch.compile(layer.forward, backend="eager")
        hf.checkpoint_layers(model, sharded.context_fn)
        hf.loss_of(model, hf.batch(rank)).backward()
        found.append(hf.gradients(model))
    assert len(found[0]) > 8
    return [key for key in found[0] if not torch.equal(found[0][key], found[1][key])]


def test_compiled_blocks_under_moe_tail(ranks: Ranks) -> None:
    assert ranks.run(compiled) == [[], []]


def refused(rank: int, description: dict[str, bool]) -> str:
    with pytest.raises(ac_moe.MoETailError) as caught:
        ac_moe.parallelize(hf.StandIn(**description), hf.mesh(2), dispatcher_recompute_cache="moe_tail")
    return str(caught.value)


@pytest.mark.parametrize(
    ("description", "reasons"),
    [
        ({"has_bias": True}, ["adds a bias", "applied after"]),
        ({"has_post_expert_norm": True}, ["applied after", "the norm after the experts reads"]),
    ],
)
def test_moe_tail_where_the_weight_cannot_be_inside(
    ranks: Ranks, description: dict[str, bool], reasons: list[str]
) -> None:
    message, _ = ranks.run(refused, description=description)
    assert all(reason in message for reason in reasons)


@pytest.mark.parametrize(
    "product",
    [nn.functional.linear, lambda x, w: x @ w.T, lambda x, w: torch.einsum("th,eh->te", x, w)],
    ids=["linear", "matmul", "einsum"],
)
def test_logits_are_pinned_however_they_are_multiplied(product: object) -> None:
    """Logits of the forward, and the router's gradient through them, although the weight has changed since."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(hf.EXPERTS, hf.HIDDEN))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return product(x, self.weight).softmax(-1)

    model = hf.StandIn()
    model.layers[0].gate = router = Router()
    router.forward = RouterForward(find_experts(model)[0])
    x = torch.randn(3, hf.HIDDEN)
    forward, recompute = ac_moe.context_fn("none", pin_routing=True)()
    with forward:
        wanted = router(x)
    with torch.no_grad():
        router.weight.mul_(-1)
    with recompute:
        again = router(x)
    assert torch.equal(again, wanted)
    assert not torch.equal(router(x), wanted)
    again.square().sum().backward()
    assert router.weight.grad.any()
