"""Whether the recompute routes as the forward did."""

from ac_moe.cache.region import Site
from ac_moe.errors import RecomputeRoutingMismatchError


def check_routing(site: Site, forward: object, recompute: object) -> None:
    """Compares two fingerprints of a layer's routing.

    On fingerprints that every rank of the group knows alike, it raises on all ranks, and none is left waiting.

    Args:
        site: the layer.
        forward: what was kept in the forward; comparable by `==`, readable by `str`.
        recompute: the same of the recompute.

    Raises:
        RecomputeRoutingMismatchError: they differ.
    """
    if forward != recompute:
        raise RecomputeRoutingMismatchError.of(site, forward, recompute)
