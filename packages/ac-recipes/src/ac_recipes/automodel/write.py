"""A translated recipe as YAML, with what was left out, and why, in comments."""

from ac_recipes.automodel.translator import Translator
from ac_recipes.reader.plain import dump_data, plain_of


def written(translator: Translator, name: str) -> str:
    """The recipe that `translator` made of the file `name`, which was read without a mistake."""
    lines = [f"# {name}, translated by ac-recipes import."]
    if translator.left_out:
        lines += ["#", "# Left out, or not quite the same:"]
        lines += [
            f"#   line {left.place.line}: {left.path} ({left.shown}): {left.reason}" for left in translator.left_out
        ]
    return "\n".join(lines) + "\n\n" + dump_data(plain_of(translator.tree))
