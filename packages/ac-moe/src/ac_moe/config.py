"""The settings of expert parallelism, as plain data. Imports neither torch nor Megatron."""

# No `from __future__ import annotations` here: a reader of the contract finds the Literals in `Field.type` itself.
import dataclasses
from typing import Literal, get_args

from ac_moe._choices import choice_mistake

# Names of the design that this version refuses. What is missing here is implemented.
NOT_BUILT: dict[str, tuple[str, ...]] = {}


def built_choices(field: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names among `known` that this version implements for `field`."""
    return tuple(name for name in known if name not in NOT_BUILT.get(field, ()))


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
            known = get_args(field.type)
            mistake = choice_mistake(field.name, getattr(self, field.name), known, built_choices(field.name, known))
            if mistake is not None:
                mistakes.append(mistake)
        if mistakes:
            raise ValueError("\n".join(mistakes))
