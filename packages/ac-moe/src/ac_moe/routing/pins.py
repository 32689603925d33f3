"""Decisions of the router that the recompute takes over from the forward."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ac_moe.cache.modes import without_dispatch_modes
from ac_moe.cache.region import Claim, Site, claim, version_of
from ac_moe.errors import RecomputeCacheError

PIN = "pin"
"""Kind of the pinned tensors that a region keeps."""
_SERVED = "_ac_moe_served"

# NOTE [ Pinned tensors ]
#
# 1. `v + (x - x.detach())` with the forward's v is not v, bit for bit. So a pin is a node of its own: its value is the
#    forward's, its gradient goes to what the recompute computed. As with combine it is the same node in both phases,
#    and saves nothing.
# 2. Routers normalise in place (`weights /= weights.sum(-1, keepdim=True)`). So the block goes on with a copy, in both
#    phases, and what is kept never changes. Pinned tensors are `[tokens, experts]` or smaller.


@torch.compiler.disable(reason="a pin keeps tensors by layer and call, which a graph cannot")
def pin(site: Site, tensor: torch.Tensor) -> torch.Tensor:
    """Makes the recompute of a checkpointed block go on with the tensor that the forward had here.

    For what decides the routing: the router's logits, or its expert ids, or both. What is computed from it is then the
    same in both phases, whatever noise, near-ties or state made the router compute something else.

        logits = ac_moe.routing.pin(site, self.gate(x))
        weights, ids = logits.softmax(-1).topk(k)

    Args:
        site: the layer: `ac_moe.routing.site_of(module)`. Several pins of a layer are told apart by their order.
        tensor: any dtype and shape.

    Returns:
        Under an ac-moe context (`context_fn` in every mode but plain `none`), a tensor of its own: a copy of `tensor`
        in the forward, and of the forward's in the recompute, whose gradient is that of `tensor`. Else `tensor`.

    Raises:
        RecomputeCacheError: the recompute pins another shape or dtype, or pins more often, or the tensor that was given
            in the forward was changed in place since.
    """
    claimed = claim(site, PIN)
    if claimed.kept is None and not claimed.keepers:
        return tensor
    if claimed.kept is not None:
        _check(site, claimed, tensor)
    pinned = _Pin.apply(tensor, claimed)
    if claimed.kept is not None:
        setattr(pinned, _SERVED, version_of(pinned))
    return pinned


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is what `pin` has served in this recompute, not changed since."""
    served = getattr(tensor, _SERVED, None)
    return served is not None and served == version_of(tensor)


class _Pin(torch.autograd.Function):
    """See NOTE [ Pinned tensors ]."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, claimed: Claim) -> torch.Tensor:  # noqa: ARG004 - saves nothing
        with without_dispatch_modes():
            if claimed.kept is None:
                claimed.keep(tensor)
                return tensor.clone()
            claimed.pass_on()
            return claimed.kept.value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004 - the identity
        return grad, None


def _check(site: Site, claimed: Claim, tensor: torch.Tensor) -> None:
    kept = claimed.kept.value
    if (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
        raise RecomputeCacheError(
            f"{site}: the recompute pins {tensor.dtype} {list(tensor.shape)} where the forward pinned {kept.dtype} "
            f"{list(kept.shape)}. The block must do the same in both: look for a condition that changed in between."
        )
    if claimed.kept.edited:
        raise RecomputeCacheError(
            f"{site}: the tensor that was pinned in the forward was changed in place since. Go on with what `pin` "
            "returns, and leave what it was given as it is."
        )
