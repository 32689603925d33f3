"""The error of this folder."""


class FusedLossError(RuntimeError):
    """The fused loss cannot be what this model's own loss is; the message says where, what logits would cost, and the
    remedy."""
