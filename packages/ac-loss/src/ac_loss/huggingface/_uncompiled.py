"""What happens under ``torch.compile``. Imported only while compiling: loading the compiler takes as long as torch."""

from typing import NoReturn

import torch

from ac_loss.huggingface.errors import FusedLossError

_REASON = (
    "torch.compile cannot trace the fused loss of a whole model in training. Compile what is below the head instead: "
    "model.model.compile() (or model.base_model.compile()), or layer.compile() for each layer"
)


# An error that dynamo meets while it traces makes it run the frame in Python instead. Disabled, it is raised when run.
@torch.compiler.disable(reason=_REASON)
def refuse_compiled(model: torch.nn.Module) -> NoReturn:
    """Refuse a training forward of `model` that is being compiled."""
    raise FusedLossError(f"{type(model).__name__}: {_REASON}")
