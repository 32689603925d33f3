"""The table for people and the object for programs."""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tools.bench.results import MIB, Outcome

_PACKAGES = ("torch", "transformers", "ac-core", "torchtitan", "nemo_automodel")
_COLUMNS = ("variant", "ms/step", "x none", "+-", "best", "ms/block", "held MiB", "peak MiB", "gradients")


def table(outcome: Outcome) -> str:
    """What was run, aligned columns, the variants that did not run, the goals."""
    shape = outcome.shape
    cells = [
        (
            row.name,
            f"{row.milliseconds:.1f}",
            f"{row.ratio:.3f}",
            f"{row.spread:.3f}",
            f"{row.best:.3f}",
            f"{row.per_block:.2f}",
            f"{row.memory.held / MIB:.1f}",
            f"{row.memory.peak / MIB:.1f}",
            row.gradients,
        )
        for row in outcome.rows
    ]
    return "\n".join(
        [
            f"{outcome.command}: d{shape.hidden_size}, S{shape.sequence_length}, B{shape.batch_size}, "
            f"{shape.blocks} blocks, fp32, one thread; {outcome.rounds} rounds of {shape.steps}",
            ", ".join(f"{name} {number or 'not installed'}" for name, number in _versions().items()),
            *_aligned([_COLUMNS, *cells]),
            *(f"{one.name}: {one.reason}" for one in outcome.missing),
            *(
                f"{'met' if goal.met else 'MISSED'}: {goal.what}: "
                f"{'no value' if goal.value is None else format(goal.value, '.3f')} (goal {goal.limit})"
                for goal in outcome.goals
            ),
        ]
    )


def as_data(outcome: Outcome) -> dict[str, Any]:
    """Everything of a run as plain data: bytes and milliseconds, unrounded."""
    goals = [{**asdict(goal), "met": goal.met} for goal in outcome.goals]
    return {**asdict(outcome), "goals": goals, "threads": 1, "machine": platform.machine(), "versions": _versions()}


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text_columns = (0, len(_COLUMNS) - 1)
    return [
        "  ".join(
            cell.ljust(width) if column in text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _versions() -> dict[str, str | None]:
    """Installed versions of what is compared; None where a package is not installed."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
