"""The fused loss in the models of Hugging Face transformers: the model's own forward and loss code, without logits."""

from ac_loss.huggingface import operations as _operations  # noqa: F401 - registers what lazy logits understand
from ac_loss.huggingface.attach import remove_fused_loss, use_fused_loss
from ac_loss.huggingface.errors import FusedLossError
from ac_loss.huggingface.lazy import LazyLogits
from ac_loss.huggingface.report import FusedLossReport

__all__ = ["FusedLossError", "FusedLossReport", "LazyLogits", "remove_fused_loss", "use_fused_loss"]
