"""Takes overrides out of a command line: of a field (`--optimizer.lr 1e-4`, `--optimizer.lr=1e-4`), or of several
fields of a section at once (`--optimizer '{lr: 1e-4, eps: 1e-6}'`)."""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ac_recipes.reader.mistakes import COMMAND_LINE, MistakeLog, Place


class Override(NamedTuple):
    """One value set on the command line.

    Attributes:
        path: Dotted path of the field, `distributed.activation_checkpointing`, or the name of a section.
        text: The value as written, YAML: `true`, `1e-4`, `[language, vision]`.
        column: Where the flag begins, counted from 1 in the space-joined arguments.
    """

    path: str
    text: str
    column: int = 1

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.split("."))

    @property
    def place(self) -> Place:
        return Place(COMMAND_LINE, 1, self.column)


def split_overrides(
    argv: Sequence[str], sections: Collection[str] = (), flags: Collection[str] = ()
) -> tuple[list[str], list[Override]]:
    """Part `argv` into the arguments for argparse and the overrides, each in the order given.

    An override is `--a.b VALUE` or `--a.b=VALUE`: the dot in its name tells it from a flag of the program. So does the
    name of a section, without a dot. A VALUE apart may begin with one dash (`-0.1`), not with two. Arguments after a
    lone `--` are left alone.

    Args:
        argv: What the user typed, without the program.
        sections: Names of the recipe's sections.
        flags: Those of `sections` that the program has as flags without a value. They are the program's, and the
            section's with a value behind `=`.

    Raises:
        RecipeError: A flag has no value, or a dot too many. Tells all of them.
    """
    rest: list[str] = []
    overrides: list[Override] = []
    log = MistakeLog()
    column, index = 1, 0
    while index < len(argv):
        taken = 1
        name, equals, text = argv[index].removeprefix("--").partition("=")
        if argv[index] == "--":
            rest += argv[index:]
            break
        of_section = name in sections and (bool(equals) or name not in flags)
        if not argv[index].startswith("--") or ("." not in name and not of_section):
            rest.append(argv[index])
        elif not of_section and not re.fullmatch(r"[^.\s]+(\.[^.\s]+)+", name):
            log.add(Place(COMMAND_LINE, 1, column), (name,), "not a dotted path such as --section.field")
        elif equals:
            overrides.append(Override(name, text, column))
        elif index + 1 < len(argv) and not argv[index + 1].startswith("--"):
            overrides.append(Override(name, argv[index + 1], column))
            taken = 2
        else:
            path = tuple(name.split("."))
            log.add(Place(COMMAND_LINE, 1, column), path, f"needs a value: --{name} VALUE or --{name}=VALUE")
        column += sum(len(token) + 1 for token in argv[index : index + taken])
        index += taken
    if log.mistakes:
        log.raise_mistakes()
    return rest, overrides
