"""The ``triton`` backend: kernels of our own for NVIDIA GPUs from Ampere on.

NOTE [ Why these kernels ]
The forward keeps a block of rows and walks through a part of the vocabulary, a 128 x 128 tile of logits on tensor cores
after the other, merged into the running softmax statistics of its rows. Parts write their own statistics and torch
merges them: nothing is locked or added atomically, so results are the same bits every time. Logits are never rounded:
the loss comes from fp32 sums. The backward makes blocks of logit gradients with a kernel like it and leaves the two
products with them to cuBLAS (NOTE [ The unfilled gradient is the memory ] in ``gradients.py``). Small gradients are not
dropped: that is faster, and another gradient.
"""

import importlib.util
import os
from typing import TYPE_CHECKING, Literal

import torch

from ac_loss.backends.triton_backend import layout

if TYPE_CHECKING:
    from ac_loss._job import Job
    from ac_loss.backends.request import Request

NAME = "triton"
OPT_IN = None
_CAPABILITY = (8, 0)


def objections(request: "Request") -> list[str]:
    """Why this backend cannot compute ``request``, each with its remedy; empty if it can."""
    found = []
    if importlib.util.find_spec("triton") is None:
        found.append("triton is not installed: pip install 'ac-loss[triton]'")
    if request.device.type == "cuda":
        found += _about_gpu(request.device)
    elif request.device.type != "cpu" or not interpreted():
        found.append(f"its kernels are for NVIDIA GPUs, and the tensors are on {request.device.type}: use 'torch'")
    if request.grad_mode == "forward":
        found.append("it recomputes, and grad_mode is 'forward': pass 'auto' or 'recompute', or use 'torch'")
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    if request.gemm_dtype not in narrow:
        found.append(f"its products are fp32, bf16 or fp16, not {request.gemm_dtype}: use 'torch'")
    elif request.weight_dtype not in (request.gemm_dtype, torch.float32):
        found.append(
            f"it returns the gradient of a {request.gemm_dtype} product in that dtype or fp32, and weight is "
            f"{request.weight_dtype}: convert weight, or use 'torch'"
        )
    return found


def interpreted() -> bool:
    """Whether triton runs its kernels in Python, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def _about_gpu(device: torch.device) -> list[str]:
    if not torch.cuda.is_available():
        return []  # The question is about a machine elsewhere.
    capability = torch.cuda.get_device_capability(device)
    if capability >= _CAPABILITY:
        return []
    return [f"it needs a GPU of compute capability 8.0 or newer, and {device} has {capability}: use 'torch'"]


def extra_bytes(request: "Request") -> int:
    """Bytes beyond inputs and returned gradients that a forward and backward hold at most."""
    count, width, vocab = request.counted, request.hidden_size, request.vocab
    held = request.label_bytes
    if not count:
        return held
    item = request.gemm_dtype.itemsize
    if count < request.tokens or request.hidden_dtype != request.gemm_dtype:
        held += count * width * item
    if request.weight_dtype != request.gemm_dtype:
        held += vocab * width * item
    parts, _ = layout.splits(count, vocab)
    # Statistics of each part, and what merging them needs.
    forward = 4 * count * (parts * (6 if request.objective.label_smoothing else 3) + 4)
    if not request.differentiated:
        return held + forward
    plan = layout.Plan.make(
        tokens=count,
        vocab=vocab,
        hidden_size=width,
        weight_itemsize=request.weight_dtype.itemsize,
        grad_hidden=request.grad_hidden,
        grad_weight=request.grad_weight,
        elsewhere=request.accum == "main_grad",
    )
    backward = 28 * count + plan.rows * plan.columns * item
    if request.grad_hidden:
        backward += 0 if plan.borrows else plan.rows * width * 4
        if count < request.tokens and request.hidden_dtype != torch.float32:
            backward += min(plan.rows, layout.ROWS_WITHOUT_WEIGHT) * width * request.hidden_dtype.itemsize
    if request.grad_bias:
        backward += vocab * (4 - request.bias_dtype.itemsize)
    return held + max(forward, backward)


def run(
    job: "Job",
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    reduction: Literal["none", "sum"],
) -> torch.Tensor:
    """The loss on checked inputs with a row that counts; as :func:`ac_loss.backends.torch_backend.run`."""
    from ac_loss.backends.triton_backend.function import RowLosses

    losses = RowLosses.apply(hidden, weight, bias, job)
    if reduction == "sum":
        return losses.sum() / job.divisor
    return losses if job.rows is None else losses.new_zeros(hidden.shape[0]).index_copy(0, job.rows, losses)
