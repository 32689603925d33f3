"""The public function: checks at the door, then a backend."""

import contextlib
import math
from typing import TYPE_CHECKING, Literal, get_args

import torch

from ac_loss import backends
from ac_loss._job import Job
from ac_loss._main_grad import main_grad_of
from ac_loss._objective import Objective
from ac_loss._validation import (
    autocast_dtype,
    check_tensors,
    is_sharded,
    refuse_sharded,
    rounds_to_float16,
    select_rows,
)
from ac_loss.config import (
    Accum,
    Backend,
    GradMode,
    GradReduce,
    check_choice,
    check_flag,
    check_grad_mode,
    check_integer,
    check_number,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Reduction = Literal["none", "sum", "mean"]


def linear_cross_entropy(  # noqa: PLR0917 - the published signature
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_label_tokens: int | torch.Tensor | None = None,
    backend: Backend = "auto",
    accum: Accum = "fp32",
    *,
    logit_scale: float = 1.0,
    grad_mode: GradMode = "auto",
    strict_nan: bool = False,
    grad_reduce_group: "ProcessGroup | None" = None,
    grad_reduce: GradReduce = "avg",
    vocab_parallel_group: "ProcessGroup | None" = None,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` against ``labels``, without allocating ``[tokens, vocab]``.

    ``ac_loss.reference`` is the specification. Labels are used as they are: shift them before the call. Tokens whose
    label is ``ignore_index`` are dropped before any work: their hidden states may hold NaN.

    Args:
        hidden: ``[..., hidden_size]``, fp64, fp32, bf16 or fp16; any strides.
        weight: ``[vocab, hidden_size]``, dtype of ``hidden`` (any under ``torch.autocast``). A ``DTensor`` is gathered
            over the ranks that hold other tokens (FSDP2), if wider than ``hidden`` in the dtype of ``hidden``, and
            stays sharded over those that hold the same (tensor parallelism); the others may be ``DTensor`` then.
        labels: ``[...]``, integers in ``[0, vocab)`` or ``ignore_index``.
        bias: ``[vocab]``.
        ignore_index: label of the tokens that do not count.
        reduction: ``"mean"`` over the labels that count, ``"sum"``, or ``"none"`` for one loss per token, 0 where
            ignored. With every label ignored the sum and the mean are 0, with gradients exactly 0.
        softcap: ``c`` of ``logits = c * tanh(logits / c)`` (Gemma 2, arXiv:2408.00118); None for none.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``, 0 to 1.
        z_loss: coefficient of ``logsumexp(logits) ** 2`` added to each token's loss (PaLM, arXiv:2204.02311).
        num_label_tokens: positive number or 0-d tensor that divides the sum of the losses under ``"sum"`` and
            ``"mean"`` alike: the labels that count over all ranks and gradient-accumulation steps.
        backend: ``"auto"``: ``"triton"`` on NVIDIA GPUs where it is installed and can compute the call, else
            ``"torch"``. By name one of these, ``"liger"``, ``"cce"`` or ``"native"``; one that cannot compute the call
            as asked is an error, and no other stands in. :func:`ac_loss.explain` says which would run and why.
        accum: where the weight gradient is summed over chunks of tokens: ``"fp32"``; ``"param"``, in the parameter's
            own dtype, which needs less memory and in bf16 loses accuracy as chunks grow in number; ``"main_grad"``,
            which adds it to the fp32 ``weight.main_grad`` in the backward and returns none through autograd
            (``weight.grad`` stays as it is), for a parameter whose owner keeps one, such as Megatron-core's
            DistributedDataParallel without ``overlap_grad_reduce``.
        logit_scale: positive number that multiplies ``hidden @ weight.T + bias``, before the softcap (Cohere's
            ``logit_scale``, the inverse of Granite's ``logits_scaling``).
        grad_mode: ``"forward"`` computes the gradients with the loss and keeps them for the backward: three GEMMs. Not
            for ``"none"``, nor where products or gradients are fp16. ``"recompute"`` keeps nothing but the inputs and
            computes the logits again in the backward: four GEMMs, and mostly the least memory. ``"auto"`` is
            ``"forward"`` where possible.
        strict_nan: whether the mean over no label at all is NaN, as in ``torch.nn.functional.cross_entropy``, instead
            of 0; the gradients are exactly 0 either way.
        grad_reduce_group: the ranks that hold different tokens. The gradient of a ``DTensor`` weight is reduced over
            them. Needed if the names of its mesh's dimensions do not tell (``dp``, ``fsdp``, ``cp``, ...). Changes
            nothing for a plain weight: whoever owns it (DDP, a FSDP forward) reduces its gradient.
        grad_reduce: ``"avg"``, the ranks' gradients are averaged, as DDP and FSDP2 do it: with ``num_label_tokens`` of
            all ranks, call ``(loss * grad_reduce_group.size()).backward()``, and every gradient of the model is that of
            the mean over all labels of all ranks. ``"sum"`` if the rest of the model is summed (FSDP2's
            ``set_gradient_divide_factor(1.0)``): call ``loss.backward()``.
        vocab_parallel_group: the ranks that hold the same tokens and each some rows of the vocabulary, in order of the
            group's ranks. Needed for plain local rows, and for a ``DTensor`` whose mesh dimension is not named ``tp``.
            Every rank gets the loss over the whole vocabulary and the whole gradient of ``hidden``.

    Returns:
        The loss in fp32, or fp64 for fp64 inputs: a scalar, or for ``"none"`` the shape of ``labels``. Gradients come
        back in the dtypes of their tensors. Only first derivatives exist.

    Raises:
        IndexError: a label is neither in range nor ``ignore_index``; names it and its flat position.
        TypeError: a tensor argument is not a tensor.
        ValueError: an option, shape, dtype or device is wrong; names it, the constraint and the remedy.
    """
    objective = check_options(
        backend=backend,
        accum=accum,
        reduction=reduction,
        ignore_index=ignore_index,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        grad_mode=grad_mode,
        num_label_tokens=num_label_tokens,
    )
    check_flag("strict_nan", strict_nan)
    check_choice("grad_reduce", grad_reduce, get_args(GradReduce))
    compute_here = compute
    if torch.compiler.is_compiling():
        from ac_loss._uncompiled import compute as compute_here
    return compute_here(
        hidden,
        weight,
        labels,
        bias,
        objective=objective,
        ignore_index=ignore_index,
        reduction=reduction,
        num_label_tokens=num_label_tokens,
        accum=accum,
        grad_mode=grad_mode,
        backend=backend,
        strict_nan=strict_nan,
        grad_reduce_group=grad_reduce_group,
        grad_reduce=grad_reduce,
        vocab_parallel_group=vocab_parallel_group,
    )


def check_options(
    *,
    backend: Backend,
    accum: Accum,
    reduction: Reduction,
    ignore_index: int,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    logit_scale: float,
    grad_mode: GradMode,
    num_label_tokens: int | torch.Tensor | None,
) -> Objective:
    """What is minimised; raises ``ValueError`` on options of the loss that are wrong by themselves."""
    check_choice("backend", backend, get_args(Backend))
    check_choice("accum", accum, get_args(Accum))
    check_choice("reduction", reduction, get_args(Reduction))
    check_integer("ignore_index", ignore_index)
    if softcap is not None:
        check_number("softcap", softcap, above_zero=True)
    check_number("label_smoothing", label_smoothing, most=1.0)
    check_number("z_loss", z_loss)
    check_number("logit_scale", logit_scale, above_zero=True)
    check_grad_mode(grad_mode, reduction)
    if reduction == "none" and num_label_tokens is not None:
        raise ValueError("num_label_tokens: divides a sum, and reduction 'none' makes none; divide the result instead")
    if isinstance(num_label_tokens, torch.Tensor):
        refuse_sharded(num_label_tokens=num_label_tokens)

    return Objective(logit_scale=logit_scale, softcap=softcap, label_smoothing=label_smoothing, z_loss=z_loss)


def check_float16(grad_mode: GradMode, gemm_dtype: torch.dtype, *inputs: torch.Tensor | None) -> None:
    """Raise ``ValueError`` where gradients would be lost before they are scaled."""
    if grad_mode == "forward" and rounds_to_float16(gemm_dtype, *inputs):
        raise ValueError(
            "grad_mode: 'forward' rounds the gradients to float16 before the backward brings the loss scale, and most "
            "would be lost; use 'auto' or 'recompute', or compute the loss on bfloat16 or float32 tensors"
        )


def compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    objective: Objective,
    ignore_index: int,
    reduction: Reduction,
    num_label_tokens: int | torch.Tensor | None,
    accum: Accum,
    grad_mode: GradMode,
    backend: Backend,
    strict_nan: bool,
    grad_reduce_group: "ProcessGroup | None",
    grad_reduce: GradReduce,
    vocab_parallel_group: "ProcessGroup | None",
) -> torch.Tensor:
    """:func:`linear_cross_entropy` once its options are checked."""
    autocast = autocast_dtype(hidden)
    vocabulary, saving = None, contextlib.nullcontext()
    if accum == "main_grad" and is_sharded(weight) and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"accum: 'main_grad' is for a weight that is a plain tensor, and this one is a DTensor (placements "
            f"{weight.placements}); use accum='fp32'"
        )
    grouped = grad_reduce_group is not None or vocab_parallel_group is not None
    if grouped or any(map(is_sharded, (hidden, weight, labels, bias))):
        from ac_loss.sharded.localize import Groups, localize  # loads torch.distributed.tensor, which takes seconds

        groups = Groups(grad_reduce_group, grad_reduce, vocab_parallel_group)
        local = localize(hidden, weight, labels, bias, groups=groups, autocast=autocast)
        hidden, weight, labels, bias, vocabulary, saving = local
    check_tensors(hidden, weight, labels, bias, autocast)
    gemm_dtype = autocast or hidden.dtype
    check_float16(grad_mode, gemm_dtype, hidden, weight, bias)
    if accum == "main_grad" and weight.requires_grad and torch.is_grad_enabled():
        main_grad_of(weight)
    vocab = weight.shape[0] if vocabulary is None else vocabulary.size
    rows = select_rows(labels, ignore_index, vocab, num_label_tokens)
    divisor = 1.0
    if rows.num_label_tokens is not None:
        divisor = rows.num_label_tokens
    elif reduction == "mean":
        divisor = float(max(rows.labels.numel(), 1))
    job = Job(
        objective=objective,
        gemm_dtype=gemm_dtype,
        accum=accum,
        grad_mode=grad_mode,
        labels=rows.labels,
        rows=rows.index,
        divisor=divisor,
        vocabulary=vocabulary,
    )
    flat = hidden.reshape(labels.numel(), weight.shape[1])
    kind = "none" if reduction == "none" else "sum"
    with saving:
        loss = backends.run(backend, job, flat, weight, bias, reduction=kind)
    if reduction == "none":
        return loss.reshape(labels.shape)
    nothing = strict_nan and reduction == "mean" and num_label_tokens is None and not rows.labels.numel()
    return loss + math.nan if nothing else loss
