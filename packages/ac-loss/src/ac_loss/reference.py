"""The specification: what every backend must compute, in plain torch and with the logits in full."""

import torch
import torch.nn.functional as F


def linear_cross_entropy(  # noqa: PLR0917 - the published signature
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_label_tokens: int | torch.Tensor | None = None,
    *,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """Same arguments and result as :func:`ac_loss.linear_cross_entropy`; ``[tokens, vocab]`` memory, any derivative.

    Logits are fp32 (fp64 for fp64 inputs) whatever the dtype of the inputs, so this is also the truth for bf16.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    flat = labels.reshape(-1)
    valid = flat != ignore_index
    rows, target = hidden.reshape(-1, hidden.shape[-1])[valid].to(dtype), flat[valid].long()

    logits = logit_scale * F.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(-1) ** 2

    if reduction == "none":
        return losses.new_zeros(flat.shape).index_put((valid,), losses).reshape(labels.shape)
    if num_label_tokens is not None:
        return losses.sum() / num_label_tokens
    return losses.sum() / max(target.numel(), 1) if reduction == "mean" else losses.sum()
