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
    if forward == recompute:
        return
    raise RecomputeRoutingMismatchError(
        f"{site}: tokens are routed differently in the recompute than in the forward; gradients would be wrong.\n"
        f"  forward:   {forward}\n"
        f"  recompute: {recompute}\n"
        "Make the router deterministic: no noise that the checkpoint does not replay, no state that the forward "
        "changes, no near-ties decided by a non-deterministic kernel.",
        site=str(site),
        forward=forward,
        recompute=recompute,
    )
