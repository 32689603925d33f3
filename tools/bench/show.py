"""The table for people and the object for programs."""

import platform
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tools.bench.results import MIB, Goal, Missing, Row
from tools.bench.shapes import Shape

_PACKAGES = ("torch", "transformers", "ac-core", "torchtitan", "nemo_automodel")
_COLUMNS = ("variant", "ms/step", "x none", "+-", "best", "ms/block", "held MiB", "peak MiB", "gradients")


def table(rows: Iterable[Row], missing: Iterable[Missing], goals: Iterable[Goal]) -> str:
    """Aligned columns, then the variants that did not run, then the goals."""
    cells = [_COLUMNS]
    for row in rows:
        cells.append(
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
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(_align(line, widths)).rstrip() for line in cells]
    lines += [f"{one.name}: {one.reason}" for one in missing]
    for goal in goals:
        value = "no value" if goal.value is None else f"{goal.value:.3f}"
        lines.append(f"{'met' if goal.met else 'MISSED'}: {goal.what}: {value} (goal {goal.limit})")
    return "\n".join(lines)


def _align(line: tuple[str, ...], widths: list[int]) -> list[str]:
    last = len(line) - 1
    return [
        cell.ljust(width) if column in (0, last) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]


def as_data(
    command: str, shape: Shape, rounds: int, rows: Iterable[Row], missing: Iterable[Missing], goals: Iterable[Goal]
) -> dict[str, Any]:
    """Everything of a run as plain data: bytes and milliseconds, unrounded."""
    return {
        "command": command,
        "shape": asdict(shape),
        "rounds": rounds,
        "threads": 1,
        "machine": platform.machine(),
        "versions": versions(),
        "rows": [asdict(row) for row in rows],
        "missing": [asdict(one) for one in missing],
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
    }


def versions() -> dict[str, str | None]:
    """Installed versions of what is compared; None where a package is not installed."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
