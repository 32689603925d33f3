"""Checks at the door, before any work: each error names the constraint, the value and the remedy."""

import math
import sys
from numbers import Real
from typing import NamedTuple

import torch

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Rows(NamedTuple):
    """The tokens that count.

    Attributes:
        labels: ``[n]`` int64, all in ``[0, vocab)``, not shared with the caller's, which may change before a backward.
        index: ``[n]`` int64, their positions among all tokens; None if every token counts.
        num_label_tokens: the caller's number as a float, or None.
    """

    labels: torch.Tensor
    index: torch.Tensor | None
    num_label_tokens: float | None


def is_sharded(tensor: object) -> bool:
    """Whether it is a ``DTensor``."""
    # Nobody holds a DTensor without this module loaded; importing it here would cost every other caller seconds.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_sharded(**tensors: torch.Tensor | None) -> None:
    """Raise ``ValueError`` for a ``DTensor`` where only a plain tensor has a meaning."""
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            raise ValueError(
                f"{name}: is a DTensor (placements {tensor.placements}), and a plain tensor is needed here; pass "
                f"{name}.full_tensor() where no gradient is wanted (a gathered weight's would be silently wrong), or "
                "compute inside the forward of the FSDP unit that owns it "
                "(torch.distributed.fsdp.register_fsdp_forward_method), where it is plain"
            )


def autocast_dtype(hidden: torch.Tensor, device: str | None = None) -> torch.dtype | None:
    """The dtype autocast wants for matrix products on ``device``, by default hidden's; None where it is off.

    It never touches fp64.
    """
    if not isinstance(hidden, torch.Tensor) or hidden.dtype == torch.float64:
        return None
    device = device or hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def check_are_tensors(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    """Raise ``TypeError`` for an argument of another type."""
    optional = {"labels": labels, "bias": bias}
    named = {"hidden": hidden, "weight": weight} | {k: v for k, v in optional.items() if v is not None}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            remedy = f"; pass its {name}" if isinstance(getattr(tensor, name, None), torch.Tensor) else ""
            raise TypeError(f"{name}: a tensor is needed, got {type(tensor).__name__}{remedy}")


def check_tensors(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor | None,
    bias: torch.Tensor | None,
    gemm_dtype: torch.dtype | None,
) -> None:
    """Raise on shapes, dtypes and devices that do not fit together. ``gemm_dtype`` is autocast's, None without it."""
    optional = {"labels": labels, "bias": bias}
    named = {"hidden": hidden, "weight": weight} | {k: v for k, v in optional.items() if v is not None}
    check_are_tensors(hidden, weight, labels, bias)
    refuse_sharded(**named)
    if labels is not None and weight.dtype in _INTEGERS and labels.dtype not in _INTEGERS:
        raise ValueError(
            f"weight, labels: {weight.dtype} and {labels.dtype}, so they seem to be exchanged; linear_cross_entropy "
            "and token_statistics take (hidden, weight, labels), FusedLinearCrossEntropy (hidden, labels, weight)"
        )
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(
            f"weight: must be [vocab, hidden_size] with vocab > 0, got {list(weight.shape)}; pass lm_head.weight as it "
            "is (flattened or sharded weights must be gathered first)"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden: must be [..., {weight.shape[1]}] to fit weight {list(weight.shape)}, got {list(hidden.shape)}; "
            "pass the input of lm_head, and weight as [vocab, hidden_size]"
        )
    if labels is not None and labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels: must be {list(hidden.shape[:-1])}, hidden's shape without its last dimension, got "
            f"{list(labels.shape)}; shift hidden and labels to the same length first"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: must be [{weight.shape[0]}], one for each row of weight, got {list(bias.shape)}")
    if labels is not None and labels.dtype not in _INTEGERS:
        raise ValueError(f"labels: must hold integers, got {labels.dtype}; call labels.long()")
    floats = {name: tensor for name, tensor in named.items() if name != "labels"}
    for name, tensor in floats.items():
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name}: must be float64, float32, bfloat16 or float16, got {tensor.dtype}; convert it")
        if gemm_dtype is None and tensor.dtype != hidden.dtype:
            autocast = "autocast leaves it alone" if hidden.dtype == torch.float64 else "or run under torch.autocast"
            raise ValueError(
                f"{name}: is {tensor.dtype} and hidden is {hidden.dtype}; convert one to the other, {autocast}"
            )
    for name, tensor in named.items():
        if tensor.layout != torch.strided:
            raise ValueError(f"{name}: is of layout {tensor.layout}; call {name}.to_dense()")
        if tensor.device != hidden.device:
            raise ValueError(f"{name}: is on {tensor.device} and hidden on {hidden.device}; move one to the other")


def rounds_to_float16(gemm_dtype: torch.dtype, *inputs: torch.Tensor | None) -> bool:
    """Whether gradients of ``inputs`` are rounded to float16: it has no room for them without the loss scale, which
    only the backward knows."""
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad and torch.is_grad_enabled()]
    return torch.float16 in {gemm_dtype, *(tensor.dtype for tensor in wanted)}


def select_rows(
    labels: torch.Tensor, ignore_index: int, vocab: int, num_label_tokens: int | float | torch.Tensor | None
) -> Rows:
    """The tokens that count, after checking that their labels are in ``[0, vocab)``.

    Args:
        labels: any shape, integers.
        ignore_index: label of the tokens that do not count.
        vocab: number of classes.
        num_label_tokens: positive number or 0-d tensor, or None.

    Raises:
        IndexError: a label that is neither in range nor ``ignore_index``.
        ValueError: ``num_label_tokens`` is not positive, or not 0-d; or ``labels`` have no values.
    """
    if labels.is_meta:
        raise ValueError("labels: are on the meta device and have no values; ac_loss.explain takes such tensors")
    number = _divisor(num_label_tokens)
    flat = labels.reshape(-1).to(torch.int64, copy=True)
    if not flat.numel():
        return Rows(flat, None, number)
    keep = flat != ignore_index
    # One transfer for all that the host must know of the labels: each stalls a GPU's queue.
    count, low, high = torch.stack([keep.sum(), *flat.masked_fill(~keep, 0).aminmax()]).tolist()
    if low < 0 or high >= vocab:
        position = int((keep & ((flat < 0) | (flat >= vocab))).nonzero()[0])
        raise IndexError(
            f"labels: {int(flat[position])} at flat position {position} is not in [0, {vocab}) and is not ignore_index "
            f"({ignore_index}); mask it with ignore_index, or check that weight covers the tokenizer's vocabulary"
        )
    if count == flat.numel():
        return Rows(flat, None, number)
    index = keep.nonzero().squeeze(1)
    return Rows(flat.index_select(0, index), index, number)


def _divisor(num_label_tokens: int | float | torch.Tensor | None) -> float | None:
    value = num_label_tokens
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise ValueError(f"num_label_tokens: must be a 0-d tensor, got {list(value.shape)}; sum it first")
        value = value.item()
    # Real, not int and float: numpy counts in types of its own.
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"num_label_tokens: must be a number or a 0-d tensor, got {num_label_tokens!r}")
    if not 0 < value < math.inf:
        raise ValueError(
            f"num_label_tokens: must be positive, got {value!r}; pass the number of labels that count over the whole "
            "batch, all ranks and gradient-accumulation steps together"
        )
    return float(value)
