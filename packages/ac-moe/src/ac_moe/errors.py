"""What ac-moe raises: while a checkpointed block is recomputed, and before `moe_tail` would go wrong."""

from torch.utils.checkpoint import CheckpointError


class RecomputeCacheError(CheckpointError):
    """What was kept of the forward cannot stand for what the recompute would produce.

    Raised during the recompute of a checkpointed block, before anything wrong reaches a gradient: the kept tensor was
    changed in place since, or the recompute calls the layer more often than the forward did.
    """


class RecomputeRoutingMismatchError(RecomputeCacheError):
    """The router sent the tokens elsewhere in the recompute than in the forward.

    Attributes:
        site: the layer, as its dispatcher is named.
        forward: what was routed in the forward (see `ac_moe.cache.combine.Fingerprint`).
        recompute: what is routed now.
    """

    def __init__(self, message: str, *, site: str = "", forward: object = None, recompute: object = None) -> None:
        super().__init__(message)
        self.site = site
        self.forward = forward
        self.recompute = recompute


class MoETailError(ValueError):
    """Mode `moe_tail` was asked for where its conditions do not hold; see `ac_moe.cache.conditions`.

    Attributes:
        unmet: each condition that does not hold, in words.
    """

    def __init__(self, message: str, unmet: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.unmet = unmet
