"""What the ranks leave for the process that started them. Loads without torch."""

from collections.abc import Mapping
from dataclasses import dataclass

OFF, CHECKPOINT, NONE, COMBINE, TAIL = VARIANTS = ("no checkpointing", "checkpoint", "none", "combine", "moe_tail")
"""How each layer is checkpointed: not, by torch's checkpoint as it is, in ac-moe's modes, which pin the routing."""
ONE_COMBINE, ONE_PROJECTION = "one combine", "one down projection"
"""What is timed alone, beside the steps."""


@dataclass(frozen=True)
class Sample:
    """Seconds on one rank: by the clock, and of its process on the CPUs."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Work:
    """What one step did on one rank.

    collectives: calls, by torch's name. product_flops: of all matrix products, as torch's profiler counts them on a CPU
    (on a GPU it does not count a grouped GEMM). The others are of `ac_moe.stats()`: `kept_bytes` and `pinned_bytes`
    those in use when all forwards were done and no backward was, `left_bytes` those after the step.
    """

    collectives: Mapping[str, int]
    product_flops: int
    stored: int
    served: int
    collectives_skipped: int
    gemms_skipped: int
    kept_bytes: int
    pinned_bytes: int
    left_bytes: int
    only_memory: tuple[str, ...]
    gradients_equal: bool


@dataclass(frozen=True)
class Measured:
    """One case on one rank: work of a step by variant; samples by variant, and of what is timed alone, in rounds."""

    dispatcher: str
    form: str
    work: Mapping[str, Work]
    samples: Mapping[str, list[Sample]]


@dataclass(frozen=True)
class Report:
    """Everything that one rank has to say."""

    device: str
    torch: str
    cases: list[Measured]
