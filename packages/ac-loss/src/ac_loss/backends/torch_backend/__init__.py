"""The ``torch`` backend: chunks of tokens on any device, in plain torch."""

from ac_loss.backends.torch_backend.cost import extra_bytes
from ac_loss.backends.torch_backend.statistics import RowStatistics, row_statistics
from ac_loss.backends.torch_backend.sweep import run

__all__ = ["NAME", "OPT_IN", "RowStatistics", "extra_bytes", "objections", "row_statistics", "run"]

NAME = "torch"
OPT_IN = None


def objections(request: object) -> list[str]:
    """None: what passes the checks at the door is computed."""
    return []
