import pytest
import torch

from ac_core.estimation.routing import Routing


def chosen(tokens, top_k, experts, **of):
    found = Routing(**of).choose(torch.Size((tokens, top_k)), experts)
    assert found.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in found.tolist())
    return found


SIZES = [(16, 2, 8), (24, 3, 8), (40, 1, 8), (16, 8, 8), (256, 8, 128)]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SIZES)
def test_every_expert_gets_as_many_tokens_as_any_other(tokens, top_k, experts):
    counts = chosen(tokens, top_k, experts).flatten().bincount(minlength=experts)
    assert set(counts.tolist()) == {tokens * top_k // experts}


def test_tokens_that_do_not_divide_are_nearly_even():
    counts = chosen(13, 2, 8).flatten().bincount(minlength=8)
    assert (counts.sum(), len(counts)) == (26, 8)
    assert counts.max() - counts.min() <= 2
    assert chosen(0, 2, 8).tolist() == []


def test_two_experts_meet_as_often_as_by_chance():
    """Of 2 among 8, the second is one of the other 3 of the same half with probability 3 / 7."""
    here = chosen(4096, 2, 8) < 4
    assert (here[:, 0] == here[:, 1]).double().mean() == pytest.approx(3 / 7, abs=0.03)


@pytest.mark.parametrize("load", [1, 1.25, 1.5, 2.0])
@pytest.mark.parametrize(("top_k", "ranks"), [(2, 2), (2, 4), (4, 2)])
def test_the_first_rank_gets_its_load(top_k, ranks, load):
    found = chosen(512, top_k, 16, ranks=ranks, load=load)
    assert (found < 16 // ranks).sum() == load * 512 * top_k / ranks
    assert torch.equal(found, chosen(512, top_k, 16, ranks=ranks, load=load))


@pytest.mark.parametrize("load", [0.9, 2.1, "1", True, float("nan"), None])
def test_loads_that_no_rank_can_have(load):
    with pytest.raises(ValueError, match=r"^expert_load: .* is no number from 1, an even share, to 2"):
        Routing(ranks=2, load=load)


def test_a_token_goes_to_an_expert_once():
    with pytest.raises(ValueError, match=r"^expert_load: the 2 experts of a rank cannot get so many rows"):
        chosen(64, 3, 4, ranks=2, load=1.5)  # two of a token's three rows at most
