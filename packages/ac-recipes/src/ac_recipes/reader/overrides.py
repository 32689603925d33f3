"""Takes dotted overrides (`--optimizer.lr 1e-4`, `--optimizer.lr=1e-4`) out of a command line."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ac_recipes.reader.mistakes import COMMAND_LINE, MistakeLog, Place


class Override(NamedTuple):
    """One value set on the command line.

    Attributes:
        path: Dotted path of the field: `distributed.activation_checkpointing`.
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


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Part `argv` into the arguments for argparse and the dotted overrides, each in the order given.

    An override is `--a.b VALUE` or `--a.b=VALUE`: the dot in its name tells it from a flag of the program. A VALUE
    apart may begin with one dash (`-0.1`), not with two. Arguments after a lone `--` are left alone.

    Raises:
        RecipeError: A dotted flag has no value, or a dot too many. Tells all of them.
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
        if not argv[index].startswith("--") or "." not in name:
            rest.append(argv[index])
        elif not re.fullmatch(r"[^.\s]+(\.[^.\s]+)+", name):
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
