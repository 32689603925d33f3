"""The settings of expert parallelism, as plain data. Imports neither torch nor Megatron."""

# No `from __future__ import annotations` here: a reader of the contract finds the Literals in `Field.type` itself.
import dataclasses
from typing import Literal, get_args

from ac_moe._choices import choice_mistake


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """How the experts of a mixture-of-experts model run (the `model.backend` section of a recipe).

    Raises:
        ValueError: one line per wrong field, each beginning with the field's name.
    """

    dispatcher: Literal["alltoall", "hybridep"] = "alltoall"
    """How tokens reach the ranks of their experts. `alltoall` is plain `torch.distributed`, on any backend;
    `hybridep` is DeepEP's HybridEP, where it is installed."""

    experts: Literal["torch_mm"] = "torch_mm"
    """How the experts multiply: torch's own matrix products."""

    dispatcher_recompute_cache: Literal["none", "combine", "moe_tail"] = "none"
    """What a checkpointed block keeps of each MoE layer for its recompute. `combine` keeps the layer's output,
    `[tokens, hidden]` per layer and in-flight microbatch, and skips the combine's communication in the recompute.
    `moe_tail` also skips the GEMM of the down projection, whose output only feeds that combine."""

    def __post_init__(self) -> None:
        mistakes = []
        for field in dataclasses.fields(self):
            mistake = choice_mistake(field.name, getattr(self, field.name), get_args(field.type))
            if mistake is not None:
                mistakes.append(mistake)
        if mistakes:
            raise ValueError("\n".join(mistakes))
