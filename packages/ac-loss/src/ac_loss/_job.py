"""What a backend is asked to compute."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ac_loss._objective import Objective
from ac_loss.config import Accum, GradMode

if TYPE_CHECKING:
    from ac_loss.sharded.vocabulary import VocabShard


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What to compute, apart from the tensors that may need gradients.

    Attributes:
        objective: what is minimised.
        gemm_dtype: dtype of the matrix products' operands and results.
        accum: where the weight gradient is summed over chunks; ``"main_grad"`` for a weight whose ``main_grad`` has
            been checked (``_main_grad.main_grad_of``), or that is frozen.
        grad_mode: as asked for; ``"forward"`` only where it is possible.
        labels: ``[n]`` int64 in ``[0, V)``, of the rows that count; not shared with the caller. V is that of the whole
            vocabulary.
        rows: ``[n]`` int64, which rows of hidden count; None if all do.
        divisor: of the sum over rows; positive, 1 where there is no sum.
        vocabulary: the part of the vocabulary whose rows weight and bias hold; None if they hold all.
    """

    objective: Objective
    gemm_dtype: torch.dtype
    accum: Accum
    grad_mode: GradMode = "auto"
    labels: torch.Tensor
    rows: torch.Tensor | None
    divisor: float = 1.0
    vocabulary: "VocabShard | None" = None

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.gemm_dtype, torch.float32)
