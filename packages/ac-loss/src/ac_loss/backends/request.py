"""The facts about a call that decide which backend may compute it and what that costs."""

import itertools
from dataclasses import dataclass, field
from typing import Literal

import torch

from ac_loss._job import Job
from ac_loss._objective import Objective
from ac_loss.config import Accum, GradMode


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call without its data.

    Attributes:
        tokens: rows of hidden.
        counted: rows whose label is not ignored.
        hidden_size: columns of hidden and weight.
        vocab: rows of weight.
        shard: whether these are only some rows of the vocabulary, the others being on other ranks.
        hidden_dtype: of hidden.
        weight_dtype: of weight.
        bias_dtype: of bias; None without one.
        gemm_dtype: of the matrix products' operands.
        device: where the tensors are.
        reduction: ``"sum"``, over some divisor, or ``"none"``.
        objective: what is minimised.
        accum: where the weight gradient is summed.
        grad_mode: when gradients are computed.
        grad_hidden: whether the gradient of hidden is wanted; likewise ``grad_weight`` and ``grad_bias``.
    """

    tokens: int
    counted: int
    hidden_size: int
    vocab: int
    shard: bool = False
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None = None
    gemm_dtype: torch.dtype
    device: torch.device
    reduction: Literal["none", "sum"] = "sum"
    objective: Objective = field(default_factory=Objective)
    accum: Accum = "fp32"
    grad_mode: GradMode = "auto"
    grad_hidden: bool = True
    grad_weight: bool = True
    grad_bias: bool = False

    @classmethod
    def of(
        cls,
        job: Job,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        reduction: Literal["none", "sum"],
    ) -> "Request":
        """Of a call that is about to be computed."""
        enabled = torch.is_grad_enabled()
        return cls(
            tokens=hidden.shape[0],
            counted=job.labels.numel(),
            hidden_size=weight.shape[1],
            vocab=weight.shape[0],
            shard=job.vocabulary is not None,
            hidden_dtype=hidden.dtype,
            weight_dtype=weight.dtype,
            bias_dtype=None if bias is None else bias.dtype,
            gemm_dtype=job.gemm_dtype,
            device=hidden.device,
            reduction=reduction,
            objective=job.objective,
            accum=job.accum,
            grad_mode=job.grad_mode,
            grad_hidden=enabled and hidden.requires_grad,
            grad_weight=enabled and weight.requires_grad,
            grad_bias=enabled and bias is not None and bias.requires_grad,
        )

    @property
    def label_bytes(self) -> int:
        """Of the job's labels, and of the positions of the rows that count."""
        return 8 * self.counted * (2 if self.counted < self.tokens else 1)

    @property
    def rounds_to_float16(self) -> bool:
        """Whether products or gradients are float16; see ``ac_loss._validation.rounds_to_float16``."""
        wanted = (self.grad_hidden, self.grad_weight, self.grad_bias)
        dtypes = (self.hidden_dtype, self.weight_dtype, self.bias_dtype)
        return torch.float16 in {self.gemm_dtype, *itertools.compress(dtypes, wanted)}

    @property
    def differentiated(self) -> bool:
        return self.grad_hidden or self.grad_weight or self.grad_bias
