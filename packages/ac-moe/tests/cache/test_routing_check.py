import pytest

import ac_moe
from ac_moe.cache.region import Site
from ac_moe.cache.routing_check import check_routing


def test_alike() -> None:
    check_routing(Site("Layer"), (1, "a"), (1, "a"))


def test_another_routing_is_told_with_both() -> None:
    with pytest.raises(ac_moe.RecomputeRoutingMismatchError) as caught:
        check_routing(Site("Layer", "layers.2"), "3 rows", "4 rows")
    error = caught.value
    assert (error.site, error.forward, error.recompute) == ("layers.2", "3 rows", "4 rows")
    assert str(error).startswith(
        "layers.2: tokens are routed differently in the recompute than in the forward; gradients would be wrong.\n"
        "  forward:   3 rows\n"
        "  recompute: 4 rows\n"
    )
    assert "make the router deterministic" in str(error)
