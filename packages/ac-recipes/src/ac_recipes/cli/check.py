"""`ac-recipes check RECIPE...`: every mistake, with file, line, column and a suggestion. Runs nothing."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from ac_recipes.automodel.rules import LeftOut
from ac_recipes.cli.show import tell_left_out
from ac_recipes.errors import UsageError
from ac_recipes.load import load_translated
from ac_recipes.reader import Mistake, Override, RecipeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this verb."""
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="files, or names of shipped recipes")


def run(options: argparse.Namespace, overrides: Sequence[Override], _arguments: list[str]) -> int:
    """Check them all; 2 if one has a mistake."""
    mistakes: list[Mistake] = []
    left_out: list[LeftOut] = []
    for name in options.recipes:
        try:
            _, translator = load_translated(name, overrides, quick=True)
        except RecipeError as error:
            mistakes += error.mistakes
            if not options.json:
                print(error)
        except UsageError as error:
            mistake = Mistake(file=name, line=1, column=1, path="", message=str(error))
            mistakes.append(mistake)
            if not options.json:
                print(error)  # of no place in a file
        else:
            if not options.json:
                note = "; ac-recipes import shows what it becomes" if translator.is_automodel else ""
                print(f"{name}: no mistake found{note}")
                tell_left_out(translator, sys.stdout)
            left_out += translator.left_out
    if options.json:
        result = {"valid": not mistakes, "errors": [asdict(mistake) for mistake in mistakes]}
        told = [{**left.place._asdict(), "path": left.path, "reason": left.reason} for left in left_out]
        print(json.dumps(result | ({"left_out": told} if told else {})))
    return 2 if mistakes else 0
