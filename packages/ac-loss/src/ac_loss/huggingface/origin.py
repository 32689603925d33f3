"""Where lazy logits come from: one training forward of one model."""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from ac_loss.config import LossConfig
from ac_loss.huggingface.errors import FusedLossError

GIB = 2**30
_PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

# NOTE [ Weights that are there only inside of their unit's forward ]
# Lazy logits outlive the forward of the head, and under FSDP2 the weight of a head that is a unit of its own does not:
# after the forward its storage is freed, and a gradient that reached it later would not be reduced. So:
# 1. The loss runs as another forward of the innermost FSDP2 unit that holds the head, unless that is the model itself,
#    whose forward is still running. FSDP2's own hooks then gather before it, free after it, and reduce in the backward.
# 2. After the model's forward has ended nothing is computed from weights that FSDP2 shards.
# 3. Whoever else frees or changes a weight in between (ZeRO-3, FSDP1, an optimizer step) is noticed by its storage and
#    version.


@dataclass(eq=False)
class Origin:
    """One training forward.

    Attributes:
        model: the class of the model.
        config: of the loss.
        unit: the FSDP2 unit to run the loss in, None where the weight is there without.
        sharded: whether FSDP2 shards the model or a part of it that holds the head.
        running: whether the model's forward has not ended.
        thread: in which it runs.
        made: how often the head made lazy logits.
        losses: how many losses were computed from them.
        weights: the tensors that the logits are made from, with the version that each had then.
    """

    model: str
    config: LossConfig
    unit: nn.Module | None = None
    sharded: bool = False
    running: bool = True
    thread: int = field(default_factory=threading.get_ident)
    made: int = 0
    losses: int = 0
    weights: list[tuple[Tensor, int]] = field(default_factory=list)

    def keep(self, weight: Tensor) -> None:
        """`weight`, or a bias, is what the logits are made from."""
        self.weights.append((weight, weight._version))

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()` where the head's weight is whole."""
        if self.sharded and not self.running:
            raise FusedLossError(
                f"{self.model}: its forward has ended, and with it the time in which FSDP2 keeps the head's weight "
                "whole and reduces its gradient. Pass labels and use outputs.loss, or compute inside of the forward"
            )
        return self._checked(compute) if self.unit is None else run_in_unit(self.unit, lambda: self._checked(compute))

    def _checked(self, compute: Callable[[], Tensor]) -> Tensor:
        for weight, version in self.weights:
            if not weight.numel() or (weight.device.type != "meta" and not weight.untyped_storage().size()):
                raise FusedLossError(
                    f"{self.model}: the weight of its head was freed or moved between the head's forward and the loss "
                    "(ZeRO-3, FSDP1 and offloading do that). Shard with FSDP2, keep the head whole, or take the fused "
                    "loss off with ac_loss.huggingface.remove_fused_loss(model)"
                )
            if weight._version != version:
                raise FusedLossError(
                    f"{self.model}: the weight of its head was changed (an optimizer step?) since the forward that "
                    "made these logits; compute from them before that"
                )
        return compute()


def run_in_unit(unit: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """`compute()` as a forward of an FSDP2 unit."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    # The method takes the name from the instance for the length of one call.
    name = "_ac_loss_forward"
    unit.__dict__[name] = compute
    try:
        register_fsdp_forward_method(unit, name)
        loss = getattr(unit, name)()
    finally:
        del unit.__dict__[name]
    return loss


def caller() -> str:
    """``file.py:line`` of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def cost(shape: torch.Size) -> str:
    """What logits of this shape take in fp32, in which transformers computes its losses."""
    return f"{4 * shape.numel() / GIB:.3g} GiB (fp32, {list(shape)})"
