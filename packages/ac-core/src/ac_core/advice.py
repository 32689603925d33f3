"""What would help, as data: the settings in it are said in the words of whoever shows it. Loads without torch."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """Another value for a setting of `estimate` and `plan`."""

    setting: str
    value: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value!r}"


FULL, SELECTIVE = Change("policy", "full"), Change("policy", "selective")
FUSED_LOSS, SHARDED, OFFLOADED = Change("loss", "fused"), Change("strategy", "fsdp2"), Change("offload", "cpu")
CHANGES = (FULL, SELECTIVE, FUSED_LOSS, SHARDED, OFFLOADED)
"""All that is ever advised."""


@dataclass(frozen=True)
class Advice:
    """A text with changes of settings in it. As a string it has them as Python's arguments: `loss='fused'`."""

    parts: tuple[str | Change, ...]

    def text(self, spelled: Callable[[Change], str]) -> str:
        """The text with each change as `spelled` says it."""
        return "".join(spelled(part) if isinstance(part, Change) else part for part in self.parts)

    def __str__(self) -> str:
        return self.text(str)
