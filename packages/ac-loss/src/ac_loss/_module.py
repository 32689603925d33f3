"""The loss as a module, with the interface of NeMo AutoModel's class of the same name."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from ac_loss._functional import Reduction, linear_cross_entropy
from ac_loss.config import Accum, Backend, GradMode, LossConfig, check_choice, check_flag, check_grad_mode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FusedLinearCrossEntropy(nn.Module):
    """:func:`ac_loss.linear_cross_entropy` with its options fixed, for training loops that call ``loss_fn(...)``.

    Args:
        ignore_index: label of the tokens that do not count.
        logit_softcapping: ``c`` of ``c * tanh(logits / c)``; 0 for none.
        reduction: ``"sum"``, ``"mean"`` or ``"none"``.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``, 0 to 1.
        z_loss: coefficient of ``logsumexp(logits) ** 2``.
        backend: ``"auto"``, or the name of one; see :func:`ac_loss.linear_cross_entropy`.
        accum: ``"fp32"``, ``"param"`` or ``"main_grad"``: where the weight gradient is summed.
        logit_scale: positive number that multiplies the logits, before the softcap.
        grad_mode: ``"auto"``, ``"forward"`` or ``"recompute"``: when gradients are computed.
        strict_nan: whether the mean over no label at all is NaN instead of 0.

    Raises:
        ValueError: an option is not valid; the message begins with its name.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float = 0,
        reduction: Reduction = "sum",
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        backend: Backend = "auto",
        accum: Accum = "fp32",
        logit_scale: float = 1.0,
        grad_mode: GradMode = "auto",
        strict_nan: bool = False,
    ) -> None:
        super().__init__()
        check_choice("reduction", reduction, ("none", "sum", "mean"))
        check_grad_mode(grad_mode, reduction)
        check_flag("strict_nan", strict_nan)
        # The settings are checked when the loss is built, not hours later at the first step.
        self.config = LossConfig(
            ignore_index=ignore_index,
            logit_softcapping=logit_softcapping,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            backend=backend,
            accum=accum,
            logit_scale=logit_scale,
            grad_mode=grad_mode,
        )
        self.reduction = reduction
        self.strict_nan = strict_nan

    def forward(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        lm_weight: torch.Tensor,
        num_label_tokens: int | torch.Tensor | None = None,
        grad_reduce_group: "ProcessGroup | None" = None,
    ) -> torch.Tensor:
        """The loss of ``hidden_states @ lm_weight.T`` against ``labels``.

        Args:
            hidden_states: ``[..., hidden_size]``.
            labels: ``[...]``, already shifted.
            lm_weight: ``[vocab, hidden_size]``, a plain tensor or a ``DTensor``.
            num_label_tokens: divides the summed loss: the labels that count over all ranks and accumulation steps.
            grad_reduce_group: the ranks that hold different tokens, over which the gradient of a sharded ``lm_weight``
                is averaged. As with FSDP2 and DDP, which average the other gradients: with ``num_label_tokens`` of all
                ranks, call ``(loss * grad_reduce_group.size()).backward()``. Changes nothing for a plain ``lm_weight``.

        Returns:
            The loss in fp32 (fp64 for fp64 inputs).

        Raises:
            ValueError: nothing tells over which ranks a sharded ``lm_weight`` is to be gathered; otherwise as
                :func:`ac_loss.linear_cross_entropy`.
        """
        config = self.config
        return linear_cross_entropy(
            hidden_states,
            lm_weight,
            labels,
            ignore_index=config.ignore_index,
            reduction=self.reduction,
            softcap=config.logit_softcapping or None,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
            num_label_tokens=num_label_tokens,
            backend=config.backend,
            accum=config.accum,
            logit_scale=config.logit_scale,
            grad_mode=config.grad_mode,
            strict_nan=self.strict_nan,
            grad_reduce_group=grad_reduce_group,
        )

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"ignore_index={config.ignore_index}, logit_softcapping={config.logit_softcapping}, "
            f"reduction={self.reduction!r}, label_smoothing={config.label_smoothing}, z_loss={config.z_loss}, "
            f"backend={config.backend!r}, accum={config.accum!r}, logit_scale={config.logit_scale}, "
            f"grad_mode={config.grad_mode!r}, strict_nan={self.strict_nan}"
        )
