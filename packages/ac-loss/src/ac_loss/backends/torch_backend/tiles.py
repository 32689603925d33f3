"""Tiles of logits: some tokens by some classes."""

from collections.abc import Iterator

import torch

from ac_loss._job import Job
from ac_loss.backends.torch_backend.chunking import spans, tile_shape
from ac_loss.backends.torch_backend.products import Projection, operand, product_dtype


class Tiles:
    """Logits of some of the rows that count and some classes at a time, in buffers that every tile overwrites.

    Args:
        job: what to compute.
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
    """

    def __init__(self, job: Job, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.job, self.hidden, self.weight, self.bias = job, hidden, weight, bias
        self.tokens, self.vocab = job.labels.numel(), weight.shape[0]
        self._first = 0 if job.vocabulary is None else job.vocabulary.start
        wide = job.loss_dtype
        self._shape = tile_shape(self.tokens, self.vocab, wide.itemsize, hidden.device.type)
        size = self._shape[0] * self._shape[1]
        self._narrow = product_dtype(job.gemm_dtype, hidden.device.type, self.tokens)
        self._product = hidden.new_empty(size, dtype=self._narrow)
        self._wide = self._product if self._narrow == wide else hidden.new_empty(size, dtype=wide)

    def rows(self) -> Iterator[slice]:
        """All rows that count, in order; one empty slice if there are none."""
        return (slice(*span) for span in (spans(self.tokens, self._shape[0]) if self.tokens else [(0, 0)]))

    def classes(self) -> Iterator[slice]:
        return (slice(*span) for span in spans(self.vocab, self._shape[1]))

    def chunk(self, rows: slice) -> torch.Tensor:
        """Hidden states, ``[rows, H]`` in the dtype of the products."""
        hidden = self.hidden[rows] if self.job.rows is None else self.hidden.index_select(0, self.job.rows[rows])
        return operand(hidden, self.job.gemm_dtype, self._narrow)

    def matrix(self, classes: slice) -> Projection:
        """Rows of the weight, ``[classes, H]``."""
        return Projection(self.weight[classes], self.job.gemm_dtype, self._narrow)

    def logits(
        self, chunk: torch.Tensor, matrix: Projection, classes: slice, *, slope: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One tile in the dtype of the losses, scaled and capped, and its slope (see ``Objective.transform_``)."""
        product = matrix.logits(chunk, _view(self._product, len(chunk), classes.stop - classes.start))
        tile = product if self._wide is self._product else _view(self._wide, *product.shape).copy_(product)
        bias = None if self.bias is None else self.bias[classes].to(tile.dtype)
        return tile, self.job.objective.transform_(tile, bias, slope=slope)

    def narrowed(self, tile: torch.Tensor) -> torch.Tensor:
        """``tile`` in the dtype of the products."""
        return tile if self._wide is self._product else _view(self._product, *tile.shape).copy_(tile)

    def positions(self, rows: slice, classes: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each row's label is in a tile: its column ``[rows, 1]``, and whether it is there at all."""
        column = (self.job.labels[rows] - (self._first + classes.start)).unsqueeze(1)
        width = classes.stop - classes.start
        return column.clamp(0, width - 1), (column >= 0) & (column < width)


def _view(buffer: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return buffer[: rows * columns].view(rows, columns)
