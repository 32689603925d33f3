"""What would help, as data: the settings in it are said in the words of whoever shows it. Loads without torch."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """Another value for a setting of `estimate` and `plan`. dp_size: the least ranks that it takes, if not those that
    there are."""

    setting: str
    value: str
    dp_size: int | None = None

    def __str__(self) -> str:
        return f"{self.setting}={self.value!r}" + (f", dp_size={self.dp_size}" if self.dp_size else "")


FULL, SELECTIVE = Change("policy", "full"), Change("policy", "selective")
FUSED_LOSS, OFFLOADED = Change("loss", "fused"), Change("offload", "cpu")
SHARDED, SPREAD = Change("strategy", "fsdp2"), Change("strategy", "fsdp2", dp_size=2)
CHANGES = (FULL, SELECTIVE, FUSED_LOSS, SHARDED, SPREAD, OFFLOADED)
"""All that is ever advised."""


def sharded(strategy: str, dp_size: int) -> Change | None:
    """What shards parameters, gradients and state where `strategy` on `dp_size` ranks does not; None where it does.
    One rank has nobody to share them with, whatever its strategy."""
    if dp_size == 1:
        return SPREAD
    return None if strategy == "fsdp2" else SHARDED


@dataclass(frozen=True)
class Advice:
    """A text with changes of settings in it. As a string it has them as Python's arguments: `loss='fused'`."""

    parts: tuple[str | Change, ...]

    def text(self, spelled: Callable[[Change], str]) -> str:
        """The text with each change as `spelled` says it."""
        return "".join(spelled(part) if isinstance(part, Change) else part for part in self.parts)

    def __str__(self) -> str:
        return self.text(str)
