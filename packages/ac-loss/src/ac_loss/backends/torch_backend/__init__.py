"""The ``torch`` backend: chunks of tokens on any device, in plain torch."""

from ac_loss.backends.torch_backend.statistics import RowStatistics, row_statistics
from ac_loss.backends.torch_backend.sweep import run

__all__ = ["RowStatistics", "row_statistics", "run"]
