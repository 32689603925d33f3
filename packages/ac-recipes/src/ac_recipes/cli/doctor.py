"""`ac-recipes doctor`: what works on this machine, and the command that mends each gap."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from ac_recipes.reader import Override

TAKES_A_RECIPE = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This verb has none of its own, and no recipe to override."""
    parser.epilog = "ok: works. note: good to know. missing, outdated, broken: the command beside it mends that."


def run(options: argparse.Namespace, _overrides: Sequence[Override], _arguments: list[str]) -> int:
    """Look, and print one line for each thing. A gap is not a failure: always 0."""
    from ac_recipes.doctor import examine

    findings = examine()
    if options.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
        return 0
    for finding in findings:
        about = f"{finding.version or '-':<14} {finding.says}" if finding.says else finding.version or "-"
        print(f"{finding.status:<8} {finding.name:<20} {about}".rstrip())
        if finding.remedy:
            print(f"{'':<29} -> {finding.remedy}")
    return 0
