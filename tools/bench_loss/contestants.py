"""What is compared: each a function (hidden [N, H], weight [V, H], labels [N]) -> mean loss."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ac_loss import linear_cross_entropy
from ac_loss.backends.torch_backend import products

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

PLAIN = "plain"
GEMMS = "three GEMMs"
"""What any implementation must at least do: logits, gradient of hidden, gradient of weight; no loss."""


@dataclass(frozen=True)
class Contestant:
    """A way to compute the loss. load: returns the function; raises ImportError where the package is missing."""

    name: str
    load: Callable[[], Loss]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    peer: bool = True


@dataclass
class Roster:
    """The contestants that can run here, and what is missing."""

    losses: dict[str, Loss] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The logits in full, their loss in fp32: what Hugging Face's models do."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def three_gemms(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 - one signature for all
    """The matrix products of a step alone, through an autograd function so that it is timed as the others are."""
    return _Gemms.apply(hidden, weight)


class _Gemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.t()
        ctx.save_for_backward(hidden, weight, logits)
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004 - products alone
        hidden, weight, logits = ctx.saved_tensors
        return logits @ weight, logits.t() @ hidden


def _ours(**options: Any) -> Callable[[], Loss]:
    return lambda: lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, **options)


def _ours_in_bf16() -> Loss:
    """As on a CPU with AMX, whatever this one has; gradients are finished in the forward."""

    def compute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with mock.patch.object(products, "cpu_is_slow_in_bfloat16", return_value=False):
            return linear_cross_entropy(hidden, weight, labels)

    return compute


def _native(**options: Any) -> Callable[[], Loss]:
    def load() -> Loss:
        from torch.nn import LinearCrossEntropyOptions

        chosen = LinearCrossEntropyOptions(**options)
        return lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels, options=chosen)

    return load


def _torchtune(chunks: int) -> Callable[[], Loss]:
    def load() -> Loss:
        from torchtune.modules.loss import CEWithChunkedOutputLoss

        loss = CEWithChunkedOutputLoss(num_output_chunks=chunks)

        def compute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            # As torchtune's recipes call it: the model returns its output projection chunk by chunk.
            logits = [F.linear(part, weight) for part in hidden[None].chunk(chunks, dim=1)]
            return loss(logits, labels[None])

        return compute

    return load


def _cce() -> Loss:
    from cut_cross_entropy import linear_cross_entropy as cce

    return lambda hidden, weight, labels: cce(hidden, weight, labels, impl="torch_compile")


def _automodel() -> Loss:
    from nemo_automodel.components.loss.chunked_ce import _ChunkedLinearCE, _linear_cross_entropy

    def compute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        losses = _ChunkedLinearCE.apply(hidden, weight, labels, 1024, -100, None, _linear_cross_entropy)
        return losses.sum() / (labels != -100).sum()

    return compute


CONTESTANTS = (
    Contestant(PLAIN, lambda: plain, peer=False),
    Contestant(GEMMS, lambda: three_gemms, peer=False),
    Contestant("ours", _ours(), peer=False),
    Contestant("ours, accum param", _ours(accum="param"), dtypes=(torch.bfloat16,), peer=False),
    Contestant("ours, bf16 products", _ours_in_bf16, dtypes=(torch.bfloat16,), peer=False),
    Contestant("ours, recompute", _ours(grad_mode="recompute"), peer=False),
    Contestant("torch native", _native()),
    Contestant("torch native, chunks of 512", _native(batch_chunk_size=512)),
    Contestant("torchtune, 8 chunks", _torchtune(8)),
    Contestant("CCE torch_compile", _cce),
    Contestant("AutoModel chunked, 1024", _automodel),
)


def roster(dtype: torch.dtype, wanted: Callable[[str], bool]) -> Roster:
    """The contestants for `dtype` whose names are `wanted`, loaded."""
    result = Roster()
    for contestant in CONTESTANTS:
        if dtype in contestant.dtypes and wanted(contestant.name):
            try:
                result.losses[contestant.name] = contestant.load()
            except ImportError as error:
                result.missing[contestant.name] = str(error).strip().splitlines()[0]
    return result
