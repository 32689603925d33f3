"""The command. See `docs/sweep.md`.

hatch run sweep full                               every class, one line a miss, then the counts
hatch run sweep selective --only MixtralForCausalLM
hatch run sweep full --dropout --jobs 2 --json full.json --need 193
"""

import argparse
import json
import platform
import sys
import textwrap
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from ac_core import ActivationCheckpointingConfig
from tools.sweep.runner import Record, run, worker_command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep", description=__doc__.splitlines()[0], formatter_class=_Raw)
    parser.add_argument("policy", help="what ac_core applies: full, selective")
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these classes alone")
    parser.add_argument("--dropout", action="store_true", help="0.1 wherever a class has a dropout by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time, one thread each")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for one class")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results; a run cut short goes on from them")
    parser.add_argument("--need", type=int, default=0, metavar="N", help="exit 1 with fewer equal classes")
    asked = parser.parse_args(arguments)
    try:
        ActivationCheckpointingConfig(policy=asked.policy)
    except ValueError as error:
        parser.error(str(error))
    if asked.jobs < 1:
        parser.error(f"--jobs: {asked.jobs} is not at least 1")
    classes = _classes()
    if unknown := set(asked.only or ()) - classes.keys():
        parser.error(f"--only: transformers has no generation class {', '.join(sorted(unknown))}")
    wanted = {name: kind for name, kind in classes.items() if not asked.only or name in asked.only}

    book = Book(asked.json, policy=asked.policy, dropout=asked.dropout)
    missing = [(name, kind) for name, kind in wanted.items() if name not in book.records]

    def done(record: Record) -> None:
        book.add(record)
        if record["outcome"] != "equal":
            line = f"{record['outcome']} {record['name']}: {record['reason']}"
            print(textwrap.shorten(line, 240), flush=True)

    run(missing, worker_command(asked.policy, 0.1 * asked.dropout), jobs=asked.jobs, limit=asked.limit, done=done)
    records = [book.records[name] for name in wanted]
    print(summary(asked.policy, records))
    return int(sum(record["outcome"] == "equal" for record in records) < asked.need)


class Book:
    """The results so far, kept in a file after each of them."""

    def __init__(self, path: Path | None, **run_of: object) -> None:
        self.path = path
        self.head = {
            **run_of,
            "torch": version("torch"),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        }
        self.records: dict[str, Record] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if {name: kept.get(name) for name in self.head} != self.head:
                sys.exit(f"--json: {path} holds another run ({kept.get('policy')}); give another file, or remove it")
            self.records = {record["name"]: record for record in kept["results"]}

    def add(self, record: Record) -> None:
        self.records[str(record["name"])] = record
        if self.path is not None:
            results = [self.records[name] for name in sorted(self.records)]
            draft = self.path.with_suffix(".part")
            draft.write_text(json.dumps({**self.head, "results": results}, indent=1) + "\n")
            draft.replace(self.path)


def summary(policy: str, records: list[Record]) -> str:
    """The counts, in two lines."""
    from tools.sweep.check import NOT_RUN

    outcomes = Counter(str(record["outcome"]) for record in records)
    ran = sum(count for outcome, count in outcomes.items() if outcome not in NOT_RUN)
    towers = [reached for record in records for reached in record.get("towers", {}).values()]
    others = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common() if outcome != "equal")
    return (
        f"{policy}: {outcomes['equal']} of {ran} classes that train are equal bit for bit"
        f" ({len(records)} looked at{'; ' + others if others else ''})\n"
        f"towers reached by gradients: {sum(towers)} of {len(towers)}"
    )


def _classes() -> dict[str, str]:
    from tools.sweep.models import classes

    return classes()


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description."""


if __name__ == "__main__":
    sys.exit(main())
