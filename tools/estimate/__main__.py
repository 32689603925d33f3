"""The command line: `python -m tools.estimate {accuracy,guide,plans}`."""

import argparse
import sys
import warnings
from fnmatch import fnmatchcase

import torch

from tools.estimate import __doc__ as description


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, print. Progress goes to standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.estimate", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("accuracy", "guide", "plans"))
    told = "accuracy: steps of such 'model policy loss'; plans: such recipes"
    parser.add_argument("--only", default="*", metavar="GLOB", help=told)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if asked.command == "guide":
        from tools.estimate.guide import table

        print(table(_say))
        return
    if asked.command == "plans":
        from tools.estimate import plans

        print(plans.table([shipped for shipped in plans.RECIPES if fnmatchcase(shipped.name, asked.only)], _say))
        return
    from tools.estimate.accuracy import CASES, DTYPES, compare, table

    outcomes = []
    for case in CASES:
        for dtype in DTYPES:
            if fnmatchcase(f"{case.model} {case.policy} {case.loss}", asked.only):
                outcomes.append(compare(case, dtype))
                _say(f"{case} {dtype}: {outcomes[-1].error:+.3%}")
    print(table(outcomes))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
