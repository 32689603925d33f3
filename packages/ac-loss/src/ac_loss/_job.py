"""What a backend is asked to compute."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ac_loss._objective import Objective
from ac_loss.config import Accum

if TYPE_CHECKING:
    from ac_loss.sharded.vocabulary import VocabShard


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What to compute, apart from the tensors that may need gradients.

    Attributes:
        objective: what is minimised.
        gemm_dtype: dtype of the matrix products' operands and results.
        accum: dtype in which the weight gradient is summed over chunks.
        labels: ``[n]`` int64 in ``[0, V)``, V of the whole vocabulary, of the rows that count; not shared with the caller.
        rows: ``[n]`` int64, which rows of hidden count; None if all do.
        divisor: of the sum over rows; positive, 1 where there is no sum.
        vocabulary: the part of the vocabulary whose rows weight and bias hold; None if they hold all.
    """

    objective: Objective
    gemm_dtype: torch.dtype
    accum: Accum
    labels: torch.Tensor
    rows: torch.Tensor | None
    divisor: float = 1.0
    vocabulary: "VocabShard | None" = None

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.gemm_dtype, torch.float32)
