"""The loss of lazy logits."""

from typing import Any

import torch
from torch import Tensor

from ac_loss._functional import linear_cross_entropy
from ac_loss.huggingface.errors import FusedLossError
from ac_loss.huggingface.expression import Expression
from ac_loss.huggingface.origin import Origin


def cross_entropy(
    expression: Expression, origin: Origin, target: Tensor, *, ignore_index: int, reduction: Any, label_smoothing: float
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` of the logits against `target`, fp32 (fp64 for fp64).

    With every label ignored it is 0, where torch's mean is NaN. Settings of the loss that the model does not use itself
    (`label_smoothing`, `z_loss`) come from the config.

    Raises:
        FusedLossError: two different label smoothings, or a label whose logits were overwritten.
    """
    config = origin.config
    if label_smoothing and config.label_smoothing and label_smoothing != config.label_smoothing:
        raise FusedLossError(
            f"label_smoothing: {origin.model} smooths by {label_smoothing} itself, and the LossConfig asks for "
            f"{config.label_smoothing}; leave it at 0"
        )
    if expression.absent is not None:
        _refuse_absent(expression.absent, target, ignore_index)

    def compute() -> Tensor:
        hidden, weight, bias, logit_scale, softcap = expression.product()
        with expression.in_its_autocast():
            return linear_cross_entropy(
                hidden,
                weight,
                target,
                bias,
                ignore_index=ignore_index,
                reduction=reduction,
                softcap=softcap,
                label_smoothing=label_smoothing or config.label_smoothing,
                z_loss=config.z_loss,
                backend=config.backend,
                accum=config.accum,
                logit_scale=logit_scale,
                grad_mode=config.grad_mode,
            )

    loss = origin.run(compute)
    origin.losses += 1
    if loss.dtype.itemsize < 4:
        raise FusedLossError(
            f"{origin.model}: the FSDP2 unit of its head rounds the loss to {loss.dtype}, which would cost it its "
            "accuracy; give that unit an mp_policy without output_dtype, or leave the head to the root's unit"
        )
    return loss.to(torch.promote_types(loss.dtype, expression.dtype))


def _refuse_absent(absent: Tensor, target: Tensor, ignore_index: int) -> None:
    wrong = torch.isin(target, absent) & (target != ignore_index)
    if wrong.any():
        position = int(wrong.reshape(-1).nonzero()[0])
        raise FusedLossError(
            f"labels: {int(target.reshape(-1)[position])} at flat position {position} is a token whose logit the model "
            f"sets to its lowest value, so that its loss is infinite; set such labels to {ignore_index}"
        )
