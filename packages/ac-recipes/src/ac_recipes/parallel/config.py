"""Sections of a recipe that belong to the parallel package. Loads without torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """`torch.compile` of every block that activation checkpointing knows, one by one.

    enabled: `false` turns it off and keeps the other settings.
    mode, backend, fullgraph, dynamic: as in `torch.compile`. `dynamic: null` lets it decide.

    Raises:
        ValueError: naming the field, the value and the valid values.
    """

    enabled: bool = True
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    backend: Literal["inductor", "aot_eager", "eager", "cudagraphs"] = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(f"mode: {self.mode!r} is a mode of backend 'inductor', not of {self.backend!r}")
