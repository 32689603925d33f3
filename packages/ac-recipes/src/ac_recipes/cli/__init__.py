"""The command line `ac-recipes`: one module a verb.

Exit codes: 0 done, 1 failed, 2 a bad recipe or bad arguments. A user's mistake is one line or one line each, never a
traceback. The verbs import torch themselves, so that `--help` is instant.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from keyword import iskeyword
from types import ModuleType
from typing import NoReturn

from ac_recipes import __version__
from ac_recipes.cli.hints import OVERRIDES_HELP, hint
from ac_recipes.cli.streams import STANDARD_OUTPUT, give_up, give_up_broken, standard_streams
from ac_recipes.errors import RunError, RunInterruptedError, UsageError
from ac_recipes.rank_process import speaks_for_all, started_by_us, told_as
from ac_recipes.reader import RecipeError, fields_of, split_overrides
from ac_recipes.recipe import Recipe

VERBS = {
    "train": "train a recipe",
    "check": "find every mistake in recipes; runs nothing",
    "estimate": "predict the memory of a step under each policy; no weights, no GPU",
    "plan": "find the cheapest checkpointing that fits a memory budget, block by block",
    "trace": "show what is saved and what is run again, op by op",
    "verify": "compare a step with checkpointing with one without, bit for bit",
    "compare": "measure none, full and selective side by side, in a table and an HTML report",
    "import": "print a recipe of NeMo AutoModel as one of ac-recipes, or say what stands against it",
    "doctor": "say what works on this machine, and the command that mends each gap",
    "schema": "print the JSON Schema of a recipe, for editors",
}
_CLOSED_PIPE = 128 + 13  # as a shell reports a program that SIGPIPE has ended; 13 on every POSIX system


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Where nobody reads on, as in `ac-recipes schema | head`, it is silent."""
    with standard_streams():
        try:
            try:
                return _main(argv)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            if not give_up_broken():
                raise
            return _CLOSED_PIPE
        except OSError as error:
            if error.filename != STANDARD_OUTPUT:
                raise
            print(f"ac-recipes: {STANDARD_OUTPUT}: {error.strerror}", file=sys.stderr)
            give_up(sys.stdout)
            return RunError.exit_code


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        parser, flags = _parsers()
        name = next((word for word in arguments if word in VERBS), "")
        own = [flag.removeprefix("--") for flag in flags.get(name, ())]  # --compile of `compare` is also a section
        rest, overrides = split_overrides(arguments, fields_of(Recipe).keys(), own)
        options = _parse(parser, rest, flags)
        verb = _module_of(options.verb)
        if overrides and not getattr(verb, "TAKES_A_RECIPE", True):
            raise UsageError(f"{options.verb} takes no recipe, and so no --{overrides[0].path}")
        return verb.run(options, overrides, arguments)
    except RecipeError as error:
        print(error, file=sys.stderr)
        if as_json and speaks_for_all():
            print(json.dumps({"valid": False, "errors": [asdict(mistake) for mistake in error.mistakes]}))
        return 2
    except (UsageError, RunError) as error:
        if (told := told_as(error)) is not None:
            print(f"ac-recipes: {told}", file=sys.stderr)
        if as_json and speaks_for_all():
            print(json.dumps({"error": str(error)}))
        return error.exit_code
    except KeyboardInterrupt:  # `train` says what is kept, once there is a run
        interrupted = RunInterruptedError(signal.SIGINT)
        if not started_by_us():  # a rank is silent: its launcher says it once
            print(f"ac-recipes: {interrupted}", file=sys.stderr)
            if as_json and speaks_for_all():
                print(json.dumps({"error": str(interrupted)}))
        return interrupted.exit_code


def _parsers() -> tuple[_Parser, dict[str, set[str]]]:
    """The parser of the command line, and the flags of each verb."""
    parser = _Parser(
        prog="ac-recipes",
        description="Train language models with activation checkpointing that can be trusted.",
        epilog=OVERRIDES_HELP,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ac-recipes {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    flags = {}
    for name, summary in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=OVERRIDES_HELP,
            allow_abbrev=False,
        )
        _module_of(name).add_arguments(verb)
        verb.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        flags[name] = set(verb._option_string_actions)
    return parser, flags


def _parse(parser: _Parser, arguments: list[str], flags: dict[str, set[str]]) -> argparse.Namespace:
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UsageError(f"unknown argument '{unknown[0]}'{hint(unknown[0], options, flags)}")
    return options


def _module_of(verb: str) -> ModuleType:
    return import_module(f"ac_recipes.cli.{verb}{'_' * iskeyword(verb)}")
