"""The command line: `python -m tools.bench {full,selective,host}`."""

import argparse
import json
import sys
from typing import Any

import torch

from tools.bench import __doc__ as description
from tools.bench.commands import DEFAULT_SHAPE, run, variants_of
from tools.bench.planned import ours_planned
from tools.bench.shapes import SHAPES
from tools.bench.show import as_data, table


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, print. Progress goes to standard error."""
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    shape = SHAPES[asked.shape or DEFAULT_SHAPE[asked.command]]
    outcome = run(
        asked.command,
        variants_of(asked.command, asked.ours, asked.only, [ours_planned(held, shape) for held in asked.held]),
        shape,
        asked.rounds,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(as_data(outcome), indent=1) if asked.json else table(outcome))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=DEFAULT_SHAPE)
    parser.add_argument("--shape", choices=SHAPES, help="default: d512; for host d64")
    parser.add_argument("--rounds", type=_rounds, default=11, help="timed rounds, 7 or more (default 11)")
    parser.add_argument(
        "--ours",
        type=_options,
        action="append",
        default=[],
        metavar="JSON",
        help='one more selective of ours, with these fields of its config: \'{"save": ["attention"]}\'; repeatable',
    )
    parser.add_argument(
        "--held",
        type=float,
        action="append",
        default=[],
        metavar="MIB",
        help="one more of ours: the cheapest mix over the blocks that holds at most this; repeatable",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="only variants of such names, and none; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="one object on standard output instead of the table")
    return parser


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 7: fewer give no stable median")
    return int(text)


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as \'{{"save": ["attention"]}}\'')
    return options


if __name__ == "__main__":
    main()
