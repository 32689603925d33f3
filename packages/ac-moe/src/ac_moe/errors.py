"""What ac-moe raises: while a checkpointed block is recomputed, and before `moe_tail` would go wrong."""

from torch.utils.checkpoint import CheckpointError


class RecomputeCacheError(CheckpointError):
    """What was kept of the forward cannot stand for what the recompute would produce.

    Raised during the recompute of a checkpointed block, before anything wrong reaches a gradient: the kept tensor was
    changed in place since, or the recompute calls the layer more often than the forward did.
    """


class RecomputeRoutingMismatchError(RecomputeCacheError):
    """The router sent the tokens elsewhere in the recompute than in the forward.

    Raised on every rank of the expert-parallel group alike, so that none waits for another.

    Attributes:
        site: the layer, as its dispatcher is named.
        forward: what was routed in the forward, in plain numbers (`ac_moe.routing.Routing` and the like).
        recompute: what is routed now.
        ranks: the ranks of the group whose tokens are routed otherwise, if known.
    """

    def __init__(
        self,
        message: str,
        *,
        site: str = "",
        forward: object = None,
        recompute: object = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.site = site
        self.forward = forward
        self.recompute = recompute
        self.ranks = ranks

    @classmethod
    def of(
        cls, site: object, forward: object, recompute: object, ranks: tuple[int, ...] = ()
    ) -> "RecomputeRoutingMismatchError":
        """The error for two routings, with what to do about it."""
        where = f", on rank {', '.join(map(str, ranks))} of its group" if ranks else ""
        return cls(
            f"{site}: tokens are routed differently in the recompute than in the forward{where}; gradients would be "
            f"wrong.\n"
            f"  forward:   {forward}\n"
            f"  recompute: {recompute}\n"
            "Keep the router's decision for the recompute (ac_moe.routing.pin), or make the router deterministic: no "
            "noise that the checkpoint does not replay, no near-ties decided by a non-deterministic kernel, and no "
            "state that the forward changes (ac_moe.routing.counted_once).",
            site=str(site),
            forward=forward,
            recompute=recompute,
            ranks=ranks,
        )


class MoETailError(ValueError):
    """Mode `moe_tail` was asked for where its conditions do not hold; see `ac_moe.cache.conditions`.

    Attributes:
        unmet: each condition that does not hold, in words.
    """

    def __init__(self, message: str, unmet: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.unmet = unmet
