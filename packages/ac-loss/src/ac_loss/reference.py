"""The specification: what every backend must compute, in plain torch and with the logits in full."""

import math

import torch
import torch.nn.functional as F

from ac_loss._statistics import TokenStatistics


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
    strict_nan: bool = False,
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
    if reduction == "mean":
        return losses.sum() / (target.numel() or (math.nan if strict_nan else 1))
    return losses.sum()


def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> TokenStatistics:
    """Same arguments and result as :func:`ac_loss.token_statistics`; ``[tokens, vocab]`` memory, any derivative."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = logit_scale * F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logsumexp, argmax = logits.logsumexp(-1), logits.argmax(-1)
    if labels is None:
        return TokenStatistics(None, logsumexp, argmax, None)
    ignored = labels == ignore_index
    log_probs = logits.gather(-1, labels.masked_fill(ignored, 0).long().unsqueeze(-1)).squeeze(-1) - logsumexp
    return TokenStatistics(
        log_probs.masked_fill(ignored, 0.0),
        logsumexp.masked_fill(ignored, 0.0),
        argmax.masked_fill(ignored, -1),
        (argmax == labels) & ~ignored,
    )
