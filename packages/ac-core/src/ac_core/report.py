"""What was asked and what was applied, block group by block group."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from ac_core.sizes import counted


@dataclass(frozen=True)
class BlockGroup:
    """Blocks next to one another of which the same is true.

    blocks: their names, in model order. asked, applied: policy names. why: how the blocks were found. reason: why what
    was applied is what it is, where that is not the policy asked for; else empty.
    """

    blocks: tuple[str, ...]
    part: str
    why: str
    asked: str
    applied: str
    reason: str = ""

    @property
    def label(self) -> str:
        """The names in short: `model.layers.0-31`."""
        first, last = self.blocks[0], self.blocks[-1]
        return first if first == last else f"{first}-{last.rpartition('.')[2]}"


@dataclass(frozen=True)
class Report:
    """The outcome of `apply_activation_checkpointing`. `print(report)` shows a table.

    policy, scope: as asked. groups: every block of the model, in or out of scope. notes: what else was changed.
    """

    policy: str
    scope: tuple[str, ...]
    groups: tuple[BlockGroup, ...]
    notes: tuple[str, ...] = ()

    @property
    def applied_blocks(self) -> tuple[str, ...]:
        """Names of the blocks that are checkpointed."""
        return tuple(name for group in self.groups if group.applied != "none" for name in group.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        total = sum(len(group.blocks) for group in self.groups)
        head = (
            f"activation checkpointing: asked {self.policy} (scope {', '.join(self.scope)})"
            f" -> applied to {len(self.applied_blocks)} of {counted(total, 'block')}"
        )
        columns = ("blocks", "count", "part", "found by", "asked", "applied", "reason")
        rows = [
            (group.label, str(len(group.blocks)), group.part, group.why, group.asked, group.applied, group.reason)
            for group in self.groups
        ]
        return "\n".join([head, *table([columns, *rows]), *(f"  {note}" for note in self.notes)])


def group_blocks(rows: Iterable[BlockGroup]) -> tuple[BlockGroup, ...]:
    """Join neighbours that differ only in their index: one line for `layers.0` to `layers.31`."""

    def key(row: BlockGroup) -> tuple[str, ...]:
        return (without_index(row.blocks[0]), row.part, row.why, row.asked, row.applied, row.reason)

    joined = []
    for _, same in groupby(rows, key):
        members = list(same)
        head = members[0]
        names = tuple(name for member in members for name in member.blocks)
        joined.append(BlockGroup(names, head.part, head.why, head.asked, head.applied, head.reason))
    return tuple(joined)


def names_text(names: Iterable[str]) -> str:
    """Names of blocks in short, those that follow one another as one: `model.layers.0-2, model.layers.7`."""
    runs: list[tuple[str, int | None, int | None]] = []  # name without index, first and last index
    for name in names:
        stem = without_index(name)
        index = int(name.removeprefix(stem)) if name != stem else None
        if runs and index is not None and runs[-1][0] == stem and runs[-1][2] == index - 1:
            runs[-1] = (stem, runs[-1][1], index)
        else:
            runs.append((stem, index, index))
    return ", ".join(
        stem if first is None else f"{stem}{first}" if first == last else f"{stem}{first}-{last}"
        for stem, first, last in runs
    )


def without_index(name: str) -> str:
    """The name of a block without the number at its end: what neighbours in a list have in common."""
    return re.sub(r"\d+$", "", name)


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with aligned columns; none for a heading alone."""
    if len(rows) == 1:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
