"""The results of some runs as the tables of `docs/sweep.md`.

hatch run python -m tools.sweep.table full.json full-dropout.json --write docs/sweep.md
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.sweep.check import EQUAL, NOT_RUN, OUTCOMES

BEGIN, END = "<!-- results: written by tools/sweep/table.py -->", "<!-- end of results -->"

Run = dict[str, Any]
"""What `sweep --json` writes: policy, dropout, versions, results."""


def tables(runs: list[Run]) -> str:
    """Markdown: the runs, the first one by kind, and every class of any run that is not equal."""
    first = runs[0]
    kinds = sorted({record["kind"] for record in first["results"]})
    by_kind = [_counts(kind, [record for record in first["results"] if record["kind"] == kind]) for kind in kinds]
    misses: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        for record in run["results"]:
            if record["outcome"] != EQUAL:
                reason = record["reason"].replace("|", "\\|")
                misses.setdefault((record["name"], record["outcome"], reason), []).append(_name(run))
    rows = [
        (f"`{name}`", "every" if len(which) == len(runs) else "; ".join(which), outcome, reason)
        for (name, outcome, reason), which in sorted(misses.items())
    ]
    unreached = [
        (f"`{record['name']}`", ", ".join(part for part, reached in record["towers"].items() if not reached))
        for record in first["results"]
        if record["outcome"] == EQUAL and not all(record["towers"].values())
    ]
    used = {outcome for _, outcome, _ in misses}
    columns = ("classes", "train here", "equal", "towers reached")
    return "\n\n".join(
        [
            f"transformers {first['transformers']}, torch {first['torch']}, Python {first['python']}, CPU, fp32.",
            _markdown(("run", *columns), [_counts(_name(run), run["results"]) for run in runs]),
            f"By kind, {_name(first)}:",
            _markdown(("kind", *columns), by_kind),
            "Every class that is not equal:",
            _markdown(("class", "run", "outcome", "reason"), rows),
            "\n".join(f"* {outcome}: {meaning}" for outcome, meaning in OUTCOMES.items() if outcome in used),
            f"Towers that no gradient reached, {_name(first)}:",
            _markdown(("class", "towers"), unreached),
        ]
    )


def write(path: Path, text: str) -> None:
    """Put `text` in the place of the tables that are in the file."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the tables: {BEGIN!r} to {END!r}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _name(run: Run) -> str:
    return f"{run['policy']}, dropout on" if run["dropout"] else run["policy"]


def _counts(label: str, records: list[dict[str, Any]]) -> tuple[str, ...]:
    outcomes = Counter(record["outcome"] for record in records)
    ran = len(records) - sum(outcomes[name] for name in NOT_RUN)
    towers = [reached for record in records for reached in record.get("towers", {}).values()]
    return (label, str(len(records)), str(ran), str(outcomes[EQUAL]), f"{sum(towers)} of {len(towers)}")


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("--" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="sweep.table", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="what `sweep --json` wrote; the first by kind")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this file, not on the screen")
    asked = parser.parse_args()
    text = tables([json.loads(path.read_text()) for path in asked.runs])
    if asked.write:
        write(asked.write, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
