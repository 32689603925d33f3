"""The tables for people and the object for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tools.bench_moe.results import Ratio, Result, Row
from tools.bench_moe.settings import FORMS, Settings

KIB = 1024
_ONE_RANK = (
    "One rank: nothing leaves the device. The combine is its permutation and its sum, without transfer and without "
    "waiting for others, so this is the least that its cache saves."
)


def page(settings: Settings, machine: dict[str, Any], results: Sequence[Result]) -> str:
    """What was run and on what, then one Markdown table for each dispatcher and form."""
    shape = settings.shape
    sizes = ", ".join(f"{name} {size}" for name, size in asdict(shape).items())
    busy = "; ".join(f"{when} {load:.1f}" for when, load in machine["load"].items())
    lines = [
        f"{settings.ranks} x {machine['device']}, {settings.dtype}, torch {machine['torch']}; {sizes}",
        f"{settings.rounds} rounds; load average of {machine['cpus']} CPUs: {busy}",
    ]
    if settings.ranks == 1:
        lines.append(_ONE_RANK)
    for result in results:
        lines += ["", *_case(settings, result)]
    return "\n".join(lines)


def as_data(settings: Settings, machine: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Everything as plain data, unrounded."""
    cases = [{**asdict(result), "projection_rate": result.alone.projection_rate} for result in results]
    return {"settings": asdict(settings), "machine": machine, "cases": cases}


def _case(settings: Settings, result: Result) -> list[str]:
    wasted = [row for row in result.rows if row.work.only_memory]
    buffer = f" ({settings.buffer} buffer)" if result.dispatcher == "hybridep" else ""
    titles = ["variant", "ms/step", "x none", "+-", "best", "predicted"]
    if settings.device == "cpu":
        titles += ["CPU x none", "+-", "best", "predicted"]
    titles += ["served", "collectives", "skipped", "GEMMs skipped", "kept KiB", "pinned KiB", "gradients"]
    alone = result.alone
    lines = [
        f"**{result.dispatcher}**{buffer}, `{FORMS[result.form]}`. One combine alone takes "
        f"{alone.combine_milliseconds:.2f} ms, one down projection {alone.projection_milliseconds:.2f} ms "
        f"({alone.projection_flops / 1e6:.0f} MFLOP at {alone.projection_rate / 1e9:.0f} GFLOP/s).",
        "",
        _line(titles),
        "|--" * len(titles) + "|",
        *(_line(_cells(row)) for row in result.rows),
    ]
    if wasted:
        variants, layers = " and ".join(row.variant for row in wasted), ", ".join(wasted[0].work.only_memory)
        lines += [
            "",
            f"`ac_moe.stats().only_memory` under {variants}: {layers}. What these kept was never served: the recompute "
            "ends before the combine (early stop), which nothing after it needs.",
        ]
    return lines


def _cells(row: Row) -> list[str]:
    work = row.work
    return [
        row.variant,
        f"{row.milliseconds:.1f}",
        *_ratio(row.wall),
        *(_ratio(row.cpu) if row.cpu else ()),
        f"{work.served} of {work.stored}",
        str(sum(work.collectives.values())),
        str(work.collectives_skipped),
        str(work.gemms_skipped),
        f"{work.kept_bytes / KIB:g}",
        f"{work.pinned_bytes / KIB:g}",
        "equal" if work.gradients_equal else "DIFFERENT",
    ]


def _ratio(ratio: Ratio) -> list[str]:
    predicted = "" if ratio.predicted is None else f"{ratio.predicted:.3f}"
    return [f"{ratio.measured:.3f}", f"{ratio.spread:.3f}", f"{ratio.best:.3f}", predicted]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
