"""A translated recipe as YAML, and what the translation does not say, with the reasons."""

from ac_recipes.automodel.translator import Translator
from ac_recipes.reader.plain import dump_data, plain_of

_HEADING = "Left out, or not quite the same:"


def left_out_text(translator: Translator) -> str:
    """What the recipe says and the translation does not, one line each with its place; empty where there is nothing."""
    return "\n".join([_HEADING, *(f"  {left}" for left in translator.left_out)]) if translator.left_out else ""


def written(translator: Translator, name: str) -> str:
    """The recipe that `translator` made of the file `name`, which was read without a mistake."""
    lines = [f"# {name}, translated by ac-recipes import."]
    if translator.left_out:
        lines += ["#", f"# {_HEADING}"]
        lines += [
            f"#   line {left.place.line}: {left.path} ({left.shown}): {left.reason}" for left in translator.left_out
        ]
    return "\n".join(lines) + "\n\n" + dump_data(plain_of(translator.tree))
