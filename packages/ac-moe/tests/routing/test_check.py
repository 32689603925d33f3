"""The agreement by itself, on routings in the form of a map; as ids it is tested through the dispatchers."""

import pytest
import torch
from ac_moe_hybridep import KINDS, communication, in_checkpoint
from ac_moe_ranks import Ranks

import ac_moe
from ac_moe.cache.region import Site
from ac_moe.routing import Routing, check

EXPERTS = 4


def routed(rank: int, runs: int, drift: str) -> torch.Tensor:
    """bool `[tokens, experts]`. In the second run rank 1 routes otherwise."""
    ids = torch.tensor([0, 1, 2, 3, 0, 1])
    if runs == 2 and rank == 1:
        ids = torch.tensor({"": [0, 1, 2, 3, 0, 1], "counts": [0] * 6, "exchanged": [1, 0, 2, 3, 0, 1]}[drift])
    return torch.nn.functional.one_hot(ids, EXPERTS).bool()


def checked(rank: int, kind: str, drift: str, checksum: bool) -> tuple[object, dict[str, int], dict[str, int]]:
    """The error, and what the forward and the backward communicated."""
    site, runs = Site("Router", "layers.7.router"), []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(0)
        check(site, routed(rank, len(runs), drift), EXPERTS, None, checksum=checksum)
        return x.sin().sin()

    x = torch.ones(2, requires_grad=True)
    with communication() as forward:
        loss = in_checkpoint(block, x, kind, "combine").sum()
    told = None
    with communication() as backward:
        try:
            loss.backward()
        except ac_moe.RecomputeRoutingMismatchError as error:
            told = (error.site, error.ranks, error.forward, error.recompute)
    return told, forward, backward


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_agreement_costs_one_number(ranks: Ranks, kind: str, checksum: bool) -> None:
    assert ranks.run(checked, kind=kind, drift="", checksum=checksum) == [(None, {}, {"all_reduce": 1})] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_other_counts(ranks: Ranks, kind: str) -> None:
    error = ("layers.7.router", (1,), Routing(6, (2, 2, 1, 1), 0), Routing(6, (6, 0, 0, 0), 0))
    communicated = {"all_reduce": 1, "all_gather": 1}
    assert ranks.run(checked, kind=kind, drift="counts", checksum=False) == [(error, {}, communicated)] * 2


def test_other_tokens_with_equal_counts(ranks: Ranks) -> None:
    case = {"kind": "early stop", "drift": "exchanged"}
    assert [told for told, *_ in ranks.run(checked, checksum=False, **case)] == [None] * 2
    (_, differing, forward, recompute), _ = (told for told, *_ in ranks.run(checked, checksum=True, **case))
    assert differing == (1,)
    assert forward.rows_per_expert == recompute.rows_per_expert == (2, 2, 1, 1)
    assert forward.checksum != recompute.checksum
    assert str(forward).startswith("6 tokens, rows per expert [2, 2, 1, 1], checksum ")


def alone(rank: int) -> dict[str, int]:
    with communication() as calls:
        check(Site("Router"), routed(rank, 1, ""), EXPERTS, None)
    return calls


def test_outside_of_a_context_it_does_nothing(ranks: Ranks) -> None:
    assert ranks.run(alone) == [{}] * 2
