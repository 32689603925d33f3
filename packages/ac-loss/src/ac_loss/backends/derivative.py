"""What the backward of every backend has in common."""

import contextlib

import torch


def refuse_double_backward() -> None:
    """Raise ``RuntimeError`` inside a backward that is to be differentiated itself."""
    # Gradients are enabled inside a backward only under create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy: a backward with create_graph=True needs second derivatives, which the fused loss "
            "does not have; use ac_loss.reference.linear_cross_entropy, which holds [tokens, vocab] logits"
        )


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Dtypes are chosen by the job; autocast must not choose again, in a backward run under it either."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
