"""`ac-recipes import FILE`: a recipe of NeMo AutoModel in our words, as YAML."""

import argparse
import json
from collections.abc import Sequence
from textwrap import fill

from ac_recipes.automodel import written
from ac_recipes.automodel.table import KNOWN
from ac_recipes.errors import UsageError
from ac_recipes.load import load_translated
from ac_recipes.reader import Override


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this verb."""
    parser.add_argument("recipe", metavar="FILE", help="a recipe of NeMo AutoModel")
    known = "".join(f"\n  {name}" for name in sorted(KNOWN))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # names stay whole, one a line
    parser.epilog = f"{fill(parser.epilog or '', 100)}\n\nknown _target_, beside transformers' configurations:{known}"


def run(options: argparse.Namespace, overrides: Sequence[Override], _arguments: list[str]) -> int:
    """Print the translation. What cannot be translated is a mistake at its place, and nothing is printed."""
    _, translator = load_translated(options.recipe, overrides, quick=True)
    if not translator.is_automodel:
        raise UsageError(f"{options.recipe} is a recipe of ac-recipes already: use it as it is")
    text = written(translator, options.recipe)
    if options.json:
        left_out = [{"line": left.place.line, "path": left.path, "reason": left.reason} for left in translator.left_out]
        print(json.dumps({"recipe": text, "left_out": left_out}))
    else:
        print(text, end="")
    return 0
