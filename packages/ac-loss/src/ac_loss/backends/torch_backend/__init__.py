"""The ``torch`` backend: chunks of tokens on any device, in plain torch."""

from typing import TYPE_CHECKING

from ac_loss.backends.torch_backend.cost import extra_bytes
from ac_loss.backends.torch_backend.products import product_dtype
from ac_loss.backends.torch_backend.statistics import RowStatistics, row_statistics
from ac_loss.backends.torch_backend.sweep import run

if TYPE_CHECKING:
    from ac_loss.backends.request import Request

__all__ = ["NAME", "OPT_IN", "RowStatistics", "extra_bytes", "objections", "product_dtype", "row_statistics", "run"]

NAME = "torch"
OPT_IN = None


def objections(request: "Request") -> list[str]:  # noqa: ARG001 - the same for all
    """None: what passes the checks at the door is computed."""
    return []
