"""Implementations of the loss, and which of them computes a call.

Each computes a :class:`ac_loss._job.Job` on tensors that are already checked. ``torch`` computes everything anywhere;
the others are measured by it.
"""

import importlib
from typing import Literal, Protocol

import torch

from ac_loss._job import Job
from ac_loss.backends.request import Request

__all__ = ["NAMES", "Backend", "Request", "choose", "load", "objections", "run"]

_MODULES = {"torch": "torch_backend", "triton": "triton_backend", "liger": "liger", "cce": "cce", "native": "native"}
NAMES = tuple(_MODULES)


class Backend(Protocol):
    """What a module in this folder has to offer."""

    NAME: str
    OPT_IN: str | None
    """Why ``auto`` never takes it; None if it may."""

    def objections(self, request: Request) -> list[str]:
        """Why it cannot compute ``request``, or not as exactly as plain cross-entropy, each reason with its remedy."""

    def extra_bytes(self, request: Request) -> int:
        """Bytes beyond inputs and returned gradients that a forward and backward of ``request`` hold at most."""

    def run(
        self,
        job: Job,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        reduction: Literal["none", "sum"],
    ) -> torch.Tensor:
        """The loss of ``[N, H]`` hidden states of which at least one counts.

        A scalar, the sum over the job's divisor, or for ``"none"`` ``[N]`` with 0 at rows that do not count; fp32, or
        fp64 for fp64 products.
        """


def load(name: str) -> Backend:
    """The backend of that name. Whether its libraries are there is told by its objections."""
    return importlib.import_module(f"ac_loss.backends.{_MODULES[name]}")


def objections(name: str, request: Request) -> list[str]:
    """Why that backend cannot compute ``request``, each reason with its remedy; empty if it can."""
    found = load(name).objections(request)
    if request.shard and name != "torch":
        found.append("it knows nothing of the rows of the vocabulary that other ranks hold: use 'torch'")
    return found


def choose(request: Request, name: str) -> str:
    """Which backend computes ``request`` when the user asks for ``name``, ``"auto"`` or a backend's.

    Raises:
        ValueError: the named one cannot; lists every reason with its remedy. Another one never stands in.
    """
    if name == "auto":
        return "triton" if request.device.type == "cuda" and not objections("triton", request) else "torch"
    if found := objections(name, request):
        reasons = "".join(f"\n  - {objection}" for objection in found)
        raise ValueError(f"backend: {name!r} cannot compute this call:{reasons}\nor use backend='auto'")
    return name


def run(
    name: str,
    job: Job,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    reduction: Literal["none", "sum"],
) -> torch.Tensor:
    """The loss of checked inputs by the backend that ``name`` stands for; see :meth:`Backend.run`."""
    chosen = choose(Request.of(job, hidden, weight, bias, reduction), name)
    # With nothing that counts there is no product to leave to anybody: zero, with zero gradients.
    backend = load(chosen if job.labels.numel() else "torch")
    return backend.run(job, hidden, weight, bias, reduction=reduction)
