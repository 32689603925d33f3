"""The ``liger`` backend: Liger-Kernel's fused linear cross-entropy (arXiv:2410.10989)."""

import importlib.util
import inspect
from typing import TYPE_CHECKING, Literal

import torch

from ac_loss._job import Job
from ac_loss.backends import adapter
from ac_loss.backends.triton_backend import interpreted

if TYPE_CHECKING:
    from ac_loss.backends.request import Request

NAME = "liger"
OPT_IN = (
    "it rounds logits to the products' dtype and takes the loss as a difference of absolute values, which a large "
    "offset common to all logits swallows"
)
_NEEDED = {"_input", "weight", "target", "bias", "label_smoothing", "lse_square_scale", "reduction", "softcap"}
_NEEDED |= {"accum_dtype"}  # from 0.6 on


def _function() -> type[torch.autograd.Function]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction


def objections(request: "Request") -> list[str]:
    """Why this backend cannot compute ``request``, each with its remedy; empty if it can."""
    found = adapter.objections(request)
    missing = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        found.insert(0, f"{' and '.join(missing)} not installed: pip install 'ac-loss[liger]'")
    else:
        found += _about_release()
    if request.device.type != "cuda" and not (request.device.type == "cpu" and interpreted()):
        found.append(f"its kernels are for GPUs, and the tensors are on {request.device.type}: use 'torch'")
    if request.gemm_dtype == torch.float64:
        found.append("it computes the losses in fp32, also for float64: use 'torch'")
    return found


def _about_release() -> list[str]:
    try:
        known = set(inspect.signature(_function().forward).parameters)
    except Exception as error:  # noqa: BLE001 - importing it runs its code, and triton's
        return [f"liger_kernel cannot be imported ({error!r}): reinstall it"]
    return ["the installed liger-kernel is too old: pip install 'liger-kernel>=0.8.5'"] if _NEEDED - known else []


def extra_bytes(request: "Request") -> int:
    """An estimate, after the source of liger-kernel 0.8.5: a chunk of logits, and the weight gradient's fp32 sum."""
    if not request.counted:
        return 0
    vocab, width, item = request.vocab, request.hidden_size, request.gemm_dtype.itemsize
    rows = 1 << (-(-request.counted // -(-vocab // width)) - 1).bit_length()
    own = min(rows, request.counted) * vocab * item
    if request.differentiated and request.grad_weight and request.accum == "fp32" and item < 4:
        own += vocab * width * 4
    if request.differentiated and not request.grad_hidden:
        own += request.counted * width * item
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
    function = _function()
    objective = job.objective

    def total(hidden, weight, bias, labels):
        given = {
            "_input": hidden,
            "weight": weight,
            "target": labels,
            "bias": bias,
            "lse_square_scale": objective.z_loss,
            "label_smoothing": objective.label_smoothing,
            "reduction": "sum",
            "softcap": objective.softcap,
            "accum_dtype": torch.float32 if job.accum == "fp32" else None,
        }
        # Autograd functions take no keywords, and the order of these has changed between releases.
        _, *parameters = inspect.signature(function.forward).parameters.values()
        return function.apply(*(given.get(p.name, p.default) for p in parameters))[0]

    return adapter.run(total, job, hidden, weight, bias)
