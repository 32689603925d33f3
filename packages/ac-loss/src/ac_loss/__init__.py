"""Fused linear cross-entropy: the loss of a language model without its logits.

Importing this package costs nothing: names are loaded on first use, so ``import ac_loss`` and ``import ac_loss.config``
do not import torch and command lines that only read settings start at once.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ac_loss._explain import Explanation, explain
    from ac_loss._functional import linear_cross_entropy
    from ac_loss._module import FusedLinearCrossEntropy
    from ac_loss._statistics import TokenStatistics, token_statistics
    from ac_loss.config import LossConfig
    from ac_loss.huggingface import remove_fused_loss, use_fused_loss

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "FusedLinearCrossEntropy",
    "LossConfig",
    "TokenStatistics",
    "explain",
    "linear_cross_entropy",
    "remove_fused_loss",
    "token_statistics",
    "use_fused_loss",
]

_HOME = {
    "Explanation": "ac_loss._explain",
    "FusedLinearCrossEntropy": "ac_loss._module",
    "LossConfig": "ac_loss.config",
    "TokenStatistics": "ac_loss._statistics",
    "explain": "ac_loss._explain",
    "linear_cross_entropy": "ac_loss._functional",
    "remove_fused_loss": "ac_loss.huggingface",
    "token_statistics": "ac_loss._statistics",
    "use_fused_loss": "ac_loss.huggingface",
}


def __getattr__(name: str) -> object:
    import importlib

    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in ("config", "huggingface", "reference", "sharded"):
        value = importlib.import_module(f"ac_loss.{name}")
    else:
        raise AttributeError(f"module 'ac_loss' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "config", "huggingface", "reference", "sharded"})
