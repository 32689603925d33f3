"""The command line: `python -m tools.bench_loss [time|memory|accuracy|all]`."""

import argparse
import fnmatch
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from tools.bench_loss import __doc__ as description
from tools.bench_loss.contestants import GEMMS, PLAIN, roster
from tools.bench_loss.measure import MIB, Inputs, paired, peak_bytes, seconds, weight_gradient_error

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIMED = {"tokens": 1024, "width": 1024, "vocab": 32000}
LARGE = {"tokens": 4096, "width": 64, "vocab": 128256}  # a small width isolates what the logits cost
LONG = {"tokens": 8192, "width": 64, "vocab": 2000}
SMALL_CHUNK = 32  # rows of each of the 256 chunks of LONG

Say = Callable[[str], None]
Wanted = Callable[[str], bool]


def time_table(dtype: str, rounds: int, wanted: Wanted, say: Say, *, ignored: float = 0.0) -> list[dict[str, Any]]:
    """Time over plain and over the three GEMMs (paired, median of rounds), peak memory beyond gradients over plain."""
    here = roster(DTYPES[dtype], lambda name: name in (PLAIN, GEMMS) or wanted(name))
    inputs = Inputs(**TIMED, dtype=DTYPES[dtype], ignored=ignored)
    times = seconds(inputs, here.losses, rounds, lambda number: say(f"time {dtype}: round {number} of {rounds}"))
    rows = []
    for name, loss in here.losses.items():
        peak = peak_bytes(inputs, loss)
        rows.append(
            {
                "name": name,
                "seconds": min(times[name]),
                "to_plain": paired(times, name),
                "best_to_plain": min(times[name]) / min(times[PLAIN]),
                "to_gemms": paired(times, name, GEMMS),
                "mib": peak / MIB,
            }
        )
        if name != GEMMS:
            rows[-1]["gradient_error"] = weight_gradient_error(inputs, loss)
    return rows + _missing(here.missing)


def memory_table(dtype: str, wanted: Wanted, say: Say) -> list[dict[str, Any]]:
    """Peak memory beyond the returned gradients at Llama 3's vocabulary."""
    here = roster(DTYPES[dtype], lambda name: name == PLAIN or (name != GEMMS and wanted(name)))
    inputs = Inputs(**LARGE, dtype=DTYPES[dtype])
    rows = []
    for name, loss in here.losses.items():
        say(f"memory {dtype}: {name}")
        rows.append({"name": name, "mib": peak_bytes(inputs, loss) / MIB})
        rows[-1]["to_plain"] = rows[-1]["mib"] / rows[0]["mib"]
    return rows + _missing(here.missing)


def accuracy_table(wanted: Wanted, say: Say) -> list[dict[str, Any]]:
    """Error of the weight's gradient in bf16 when ours takes 256 chunks."""
    from ac_loss.backends.torch_backend import chunking

    here = roster(torch.bfloat16, lambda name: name != GEMMS and (name == PLAIN or wanted(name)))
    inputs = Inputs(**LONG, dtype=torch.bfloat16)
    rows, held = [], (chunking.ROWS_NARROW, chunking.ROWS_WIDE, chunking.ROWS_FLOOR)
    chunking.ROWS_NARROW = chunking.ROWS_WIDE = chunking.ROWS_FLOOR = SMALL_CHUNK
    try:
        for name, loss in here.losses.items():
            say(f"accuracy bf16: {name}")
            rows.append({"name": name, "gradient_error": weight_gradient_error(inputs, loss)})
    finally:
        chunking.ROWS_NARROW, chunking.ROWS_WIDE, chunking.ROWS_FLOOR = held
    return rows + _missing(here.missing)


def _missing(missing: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "missing": reason} for name, reason in missing.items()]


def show(title: str, rows: list[dict[str, Any]]) -> str:
    """A Markdown table of rows that have the same keys; a missing contestant has its reason instead."""
    columns = [key for key in rows[0] if key != "missing"]
    columns += [key for row in rows for key in row if key not in (*columns, "missing")][:1]
    lines = [f"\n{title}\n", f"| {' | '.join(columns)} |", f"|{'--|' * len(columns)}"]
    for row in rows:
        if "missing" in row:
            lines.append(f"| {row['name']} | not installed: {row['missing']} |")
        else:
            lines.append(f"| {' | '.join(_cell(column, row.get(column)) for column in columns)} |")
    return "\n".join(lines)


def _cell(column: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return {"mib": "{:.1f}", "gradient_error": "{:.1e}", "seconds": "{:.2f}"}.get(column, "{:.3f}").format(value)


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, print. Progress goes to standard error."""
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    dtypes = [asked.dtype] if asked.dtype else list(DTYPES)

    def wanted(name: str) -> bool:
        return not asked.only or any(fnmatch.fnmatch(name, pattern) for pattern in asked.only)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    tables: dict[str, list[dict[str, Any]]] = {}
    for dtype in dtypes:
        if asked.what in ("time", "all"):
            tables[f"time, {dtype}"] = time_table(dtype, asked.rounds, wanted, say)
            tables[f"time, {dtype}, half of the labels ignored"] = time_table(
                dtype, asked.rounds, wanted, say, ignored=0.5
            )
        if asked.what in ("memory", "all"):
            tables[f"memory, {dtype}"] = memory_table(dtype, wanted, say)
    if asked.what in ("accuracy", "all"):
        tables["weight gradient in bf16, 256 chunks"] = accuracy_table(wanted, say)
    if asked.json:
        print(json.dumps(tables, indent=1))
    else:
        print("\n".join(show(title, rows) for title, rows in tables.items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_loss",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", default="all", choices=("time", "memory", "accuracy", "all"))
    parser.add_argument("--dtype", choices=DTYPES, help="default: both")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="only such contestants; repeatable")
    parser.add_argument("--json", action="store_true", help="one object on standard output instead of the tables")
    return parser


if __name__ == "__main__":
    main()
