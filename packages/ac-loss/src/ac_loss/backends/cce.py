"""The ``cce`` backend: Cut Cross-Entropy (arXiv:2411.09009). Its kernels on GPUs, its ``torch_compile`` on CPUs."""

import importlib.util
from typing import TYPE_CHECKING, Literal

import torch

from ac_loss._job import Job
from ac_loss.backends import adapter

if TYPE_CHECKING:
    from ac_loss.backends.request import Request

NAME = "cce"
OPT_IN = (
    "its kernels sum gradients over tiles in the dtype of hidden, in the order in which tiles are done, and its "
    "torch_compile implementation holds the logits"
)


def objections(request: "Request") -> list[str]:
    """Why this backend cannot compute ``request``, each with its remedy; empty if it can."""
    found = adapter.objections(request)
    missing = [name for name in ("cut_cross_entropy", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        found.insert(0, f"{' and '.join(missing)} not installed: pip install 'ac-loss[cce]'")
    if request.bias_dtype is not None:
        found.append("it takes no bias: use 'torch' or 'triton'")
    objective = request.objective
    for name in ("label_smoothing", "z_loss"):
        if getattr(objective, name):
            found.append(f"it has no {name}: use 'torch' or 'triton'")
    if request.gemm_dtype == torch.float64:
        found.append("it computes the losses in fp32, also for float64: use 'torch'")
    if request.device.type == "cuda":
        if request.gemm_dtype == torch.float32:
            found.append("its kernels differentiate float16 and bfloat16 only: use 'torch' or 'triton', or autocast")
        if request.accum == "fp32":
            found.append(
                f"its kernels sum the weight's gradient in {request.gemm_dtype}, and accum is 'fp32': pass "
                "accum='param', or use 'torch' or 'triton'"
            )
    elif request.device.type != "cpu":
        found.append(f"it is adapted for CUDA and CPU, and the tensors are on {request.device.type}: use 'torch'")
    return found


def extra_bytes(request: "Request") -> int:
    """An estimate, after cut-cross-entropy 25.1.1: a few numbers a token for its kernels, else the logits."""
    kernels = request.device.type == "cuda"
    own = 12 * request.counted if kernels else request.counted * request.vocab * request.gemm_dtype.itemsize
    return adapter.extra_bytes(request, own)


def run(
    job: Job,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    *,
    reduction: Literal["sum"],  # noqa: ARG001 - others are refused
) -> torch.Tensor:
    """The loss on checked inputs with a row that counts; see :class:`ac_loss.backends.Backend`."""
    from cut_cross_entropy import linear_cross_entropy

    implementation = "cce" if hidden.is_cuda else "torch_compile"

    def total(hidden, weight, _bias, labels):
        # Gradients below a threshold are not dropped, as they are by default: that is faster, and another gradient.
        return linear_cross_entropy(
            hidden,
            weight.contiguous(),
            labels,
            softcap=job.objective.softcap,
            reduction="sum",
            filter_eps=None,
            impl=implementation,
        )

    return adapter.run(total, job, hidden, weight, bias)
