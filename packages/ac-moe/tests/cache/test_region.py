import copy
import pickle
from collections.abc import Callable

import pytest
import torch

import ac_moe
from ac_moe.cache.region import PROJECTION, Activation, Claim, Phase, Region, Site, active, claim


def combine_once(site: Site, value: float) -> Claim:
    """What `combine` does with its claim."""
    claimed = claim(site)
    if claimed.kept is not None:
        claimed.pass_on()
    else:
        claimed.keep(torch.full((2, 3), value))
    return claimed


def served(site: Site) -> float | None:
    kept = combine_once(site, -1.0).kept
    return None if kept is None else kept.value[0, 0].item()


def test_by_site_and_call_not_by_order() -> None:
    a, b = Site("Layer"), Site("Layer")
    forward, recompute = ac_moe.context_fn("combine")()
    with forward:
        for site, value in ((a, 1.0), (b, 2.0), (a, 3.0)):
            combine_once(site, value)
    for _ in range(2):
        with recompute:
            assert [served(b), served(a), served(a)] == [2.0, 1.0, 3.0]
    with recompute:  # a recompute that stopped early does not shift the next one
        assert served(a) == 1.0
    with recompute:
        assert [served(a), served(a), served(b)] == [1.0, 3.0, 2.0]


def test_a_forward_that_runs_again_begins_anew() -> None:
    site = Site("Layer")
    forward, recompute = ac_moe.context_fn("combine")()
    for value in (1.0, 2.0):
        with forward:
            combine_once(site, value)
    with recompute:
        assert served(site) == 2.0


def test_recompute_that_combines_more_often() -> None:
    site = Site("Layer", "layers.0.moe")
    forward, recompute = ac_moe.context_fn("combine")()
    with forward:
        combine_once(site, 1.0)
    with recompute:
        assert served(site) == 1.0
        with pytest.raises(ac_moe.RecomputeCacheError) as caught:
            claim(site)
    assert str(caught.value) == (
        "layers.0.moe: the recompute of a checkpointed block calls combine 2 times here, its forward kept 1. The block "
        "must do the same in both: look for a condition that changed in between (a step counter, a cache, train/eval, "
        "grad mode)."
    )


def test_recompute_within_its_own_forward_computes_what_is_not_there_yet() -> None:
    site = Site("Layer")
    forward, recompute = ac_moe.context_fn("combine")()
    with forward:
        combine_once(site, 1.0)
        with recompute:
            assert [served(site), served(site)] == [1.0, None]
        combine_once(site, 2.0)
    with recompute:
        assert [served(site), served(site)] == [1.0, 2.0]


def test_no_region_no_grad() -> None:
    site = Site("Layer")
    nothing = Claim(site, "combine", kept=None, source=None, keepers=[])
    assert combine_once(site, 1.0) == nothing
    forward, _ = ac_moe.context_fn("combine")()
    with forward, torch.no_grad():
        assert combine_once(site, 1.0) == nothing


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reentrant", [False, True])
def test_decisions_of_a_part_without_gradients_are_kept(without: Callable, reentrant: bool) -> None:
    site, region = Site("Router"), Region(reentrant=reentrant)
    with Entered(region, Phase.FORWARD), without():
        claim(site, "pin").keep(torch.ones(2) * 3)
        assert bool(claim(site, "combine").keepers) == reentrant
    with Entered(region, Phase.RECOMPUTE), without():
        kept = claim(site, "pin").kept
        assert (kept.value.tolist(), kept.edited) == ([3.0, 3.0], False)


def test_inner_forward_in_an_outer_recompute_keeps_what_is_served() -> None:
    site = Site("Layer")
    made = ac_moe.context_fn("combine")
    forward, recompute = made()
    inner_forward, inner_recompute = made()
    ac_moe.reset_stats()
    with forward:
        combine_once(site, 1.0)
    with recompute, inner_forward:
        assert served(site) == 1.0
    with inner_recompute:
        assert served(site) == 1.0
    assert ac_moe.stats().stored == 1


def test_entries_die_with_the_contexts() -> None:
    before = ac_moe.stats().live_entries
    forward, recompute = ac_moe.context_fn("combine")()
    with forward:
        combine_once(Site("Layer"), 1.0)
    del forward
    assert ac_moe.stats().live_entries == before + 1
    del recompute
    assert ac_moe.stats().live_entries == before


def test_copies_of_a_site_are_other_sites() -> None:
    site, named = Site("Layer"), Site("Layer", "layers.1")
    for other in (copy.deepcopy(site), copy.copy(site), pickle.loads(pickle.dumps(site))):
        assert other is not site
        assert str(other) != str(site)
    assert str(copy.deepcopy(named)) == "layers.1"


def test_kinds_are_counted_apart() -> None:
    site = Site("Layer")
    forward, recompute = ac_moe.context_fn("combine")()
    with forward:
        claim(site, "layout").keep("first layout")
        combine_once(site, 1.0)
        claim(site, "layout").keep("second layout")
    with recompute:
        assert served(site) == 1.0
        assert [claim(site, "layout").kept.value for _ in range(2)] == ["first layout", "second layout"]
        with pytest.raises(ac_moe.RecomputeCacheError, match="calls layout 3 times here, its forward kept 2"):
            claim(site, "layout")


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("none", ["logits"]), ("combine", ["combine", "logits"]), ("moe_tail", ["combine", PROJECTION, "logits"])],
)
def test_which_mode_keeps_what(mode: str, kept: list[str]) -> None:
    site = Site("Layer")
    forward, recompute = ac_moe.context_fn(mode, pin_routing=True)()
    kinds = ["combine", PROJECTION, "logits"]
    with forward:
        for kind in kinds:
            claim(site, kind).keep(torch.ones(1))
    with recompute:
        assert [kind for kind in kinds if claim(site, kind).kept is not None] == kept


def test_what_is_kept_is_told_from_what_it_became() -> None:
    site, x = Site("Layer"), torch.ones(3, requires_grad=True) * 2
    forward, recompute = ac_moe.context_fn("combine")()
    with forward:
        claim(site, "logits").keep(x, fingerprint="as it was")
        claim(site, "layout").keep([1, 2])
    with recompute:
        kept = claim(site, "logits").kept
        assert (kept.edited, kept.fingerprint) == (False, "as it was")
        assert not kept.value.requires_grad
        assert kept.value.data_ptr() == x.data_ptr()
        assert not claim(site, "layout").kept.edited
    x.detach().add_(1)
    assert kept.edited


class Entered:
    """One entering of a region, without a checkpoint."""

    def __init__(self, region: Region, phase: Phase) -> None:
        self.activation = Activation(region, phase)

    def __enter__(self) -> None:
        self.activation.push()

    def __exit__(self, *_: object) -> None:
        self.activation.pop()


def test_a_reentrant_region_counts_whatever_grad_mode_says() -> None:
    site, region = Site("Layer"), Region(reentrant=True)
    with torch.no_grad(), Entered(region, Phase.FORWARD):
        combine_once(site, 1.0)
        combine_once(site, 2.0)
    with Entered(region, Phase.RECOMPUTE):
        with torch.no_grad():
            assert served(site) == 1.0
        assert served(site) == 2.0


def test_regions_around_a_reentrant_one_count_its_calls() -> None:
    site, outer, inner = Site("Layer"), Region(), Region(reentrant=True)
    with Entered(outer, Phase.FORWARD):
        with torch.no_grad(), Entered(inner, Phase.FORWARD):
            combine_once(site, 1.0)
        with torch.no_grad():
            combine_once(site, -1.0)
        combine_once(site, 2.0)
    assert [kept.value[0, 0].item() for kept in outer.kept.values()] == [1.0, 2.0]
    assert [kept.value[0, 0].item() for kept in inner.kept.values()] == [1.0]


def test_active_looks_no_further_than_the_innermost_recompute() -> None:
    tail, combine = Region("moe_tail"), Region("combine")
    assert not active(Phase.FORWARD, "moe_tail")
    with Entered(tail, Phase.FORWARD):
        with Entered(combine, Phase.FORWARD):
            assert active(Phase.FORWARD, "moe_tail")
            assert not active(Phase.RECOMPUTE, "moe_tail")
        with Entered(combine, Phase.RECOMPUTE):
            assert not active(Phase.FORWARD, "moe_tail")
        with Entered(tail, Phase.RECOMPUTE):
            assert active(Phase.RECOMPUTE, "moe_tail")
