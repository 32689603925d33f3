"""The ``native`` backend: torch's own ``F.linear_cross_entropy``, in chunks, where it has one."""

import inspect
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from ac_loss._job import Job
from ac_loss.backends import adapter

if TYPE_CHECKING:
    from ac_loss.backends.request import Request

NAME = "native"
OPT_IN = "it computes what 'torch' does in fp32 and fp64, in smaller chunks (about twice the time on a CPU)"


def _parameters() -> frozenset[str]:
    """What ``F.linear_cross_entropy`` takes; empty where it cannot work in chunks."""
    function = getattr(F, "linear_cross_entropy", None)
    names = frozenset(inspect.signature(function).parameters) if function else frozenset()
    return names if "options" in names and hasattr(torch.nn, "LinearCrossEntropyOptions") else frozenset()


def objections(request: "Request") -> list[str]:
    """Why this backend cannot compute ``request``, each with its remedy; empty if it can."""
    known = _parameters()
    if not known:
        return [f"torch {torch.__version__} has no F.linear_cross_entropy with options: upgrade torch, or use 'torch'"]
    found = adapter.objections(request)
    if request.bias_dtype is not None and "linear_bias" not in known:
        found.append("this torch's takes no linear_bias: upgrade torch, or use 'torch'")
    if request.gemm_dtype == torch.bfloat16:
        found.append("it sums the loss and the weight's gradient over chunks in bfloat16 (torch 2.13): use 'torch'")
    objective = request.objective
    for name, off in (("softcap", None), ("label_smoothing", 0.0), ("z_loss", 0.0)):
        if getattr(objective, name) != off:
            found.append(f"it has no {name}, or not in chunks: use 'torch'")
    return found


def extra_bytes(request: "Request") -> int:
    """An estimate, after the source of torch 2.13: one chunk of logits, and zeros as large as the gradients.

    (The gradients are outputs of its operator, and autograd makes zeros for what flows back into unused outputs.)
    """
    if not request.counted:
        return 0
    smaller = -(-request.vocab // request.hidden_size)
    rows = 1 << (-(-request.counted // smaller) - 1).bit_length()
    rows = max(1, min(rows // 2, request.counted))
    own = rows * request.vocab * request.gemm_dtype.itemsize + adapter.gradient_bytes(request)
    return adapter.extra_bytes(request, own)


def run(
    job: Job,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    reduction: Literal["sum"],  # noqa: ARG001 - others are refused
) -> torch.Tensor:
    """The loss on checked inputs with a row that counts; see :class:`ac_loss.backends.Backend`."""

    def total(hidden, weight, bias, labels):
        extra = {} if bias is None else {"linear_bias": bias}
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options, **extra)

    return adapter.run(total, job, hidden, weight, bias)
