"""What was probably meant by an argument that the command line does not know."""

import argparse
from collections.abc import Mapping
from difflib import get_close_matches

from ac_recipes.reader import fields_of, homes_of, synonym_of
from ac_recipes.recipe import Recipe

OVERRIDES_HELP = (
    "Fields of the recipe are overridden as --section.field VALUE, for instance --optimizer.lr 1e-4; several of a "
    "section at once as --section '{field: VALUE, ...}'."
)


def hint(word: str, options: argparse.Namespace, flags: Mapping[str, set[str]]) -> str:
    """The end of the sentence that `word` is unknown: what is wrong with it, or what to write.

    options: what was understood of the command line. flags: those of each verb.
    """
    name = word.partition("=")[0]
    bare = name.lstrip("-")
    sections = fields_of(Recipe).keys()
    if "." in bare and bare.partition(".")[0] in sections:
        return f"; did you mean '--{bare}'?"
    if not word.startswith("-") and "=" not in word:
        given = getattr(options, "recipe", None)
        return f". {OVERRIDES_HELP}" if given is None else f"; a recipe is already given: {given}"
    if owners := [verb for verb, own in flags.items() if name in own]:
        return f"; it belongs to {' and '.join(owners)}, and not to {options.verb}"
    known = {"--help", *flags[options.verb], *(f"--{section}" for section in sections)}
    if near := get_close_matches(name, known, n=1, cutoff=0.7):
        return f"; did you mean '{near[0]}'?"
    field = bare if homes_of(bare, Recipe) else synonym_of(bare)
    homes = homes_of(field, Recipe) if field else []
    if homes:
        places = " or ".join(f"'--{'.'.join((*home, field))}'" for home in homes)
        return f"; did you mean {places}?"
    return f". {OVERRIDES_HELP}"
