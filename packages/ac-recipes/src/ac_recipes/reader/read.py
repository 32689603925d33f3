"""`read_recipe`: the steps from a file and overrides to a dataclass, in order."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TypeVar

from ac_recipes.reader.compose import compose, locate_in
from ac_recipes.reader.merge import put, value_node
from ac_recipes.reader.mistakes import KeyPath, MistakeLog, Place
from ac_recipes.reader.nodes import MapNode, RefusedNode, ScalarNode, place_at
from ac_recipes.reader.overrides import Override
from ac_recipes.reader.schema import fields_of
from ac_recipes.reader.source import check_text, load_text
from ac_recipes.reader.structure import Structurer
from ac_recipes.reader.targets import refuse_targets
from ac_recipes.reader.wording import got

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a check has against a recipe that its types allow. `at_key`: the key is wrong, and not its value."""

    path: KeyPath
    message: str
    suggestion: str | None = None
    at_key: bool = False


def read_recipe(
    schema: type[T],
    source: Path | str,
    overrides: Iterable[Override] = (),
    *,
    text: str | None = None,
    rewrite: Callable[[MapNode, MistakeLog], MapNode] | None = None,
    checks: Iterable[Callable[[T], Iterable[Problem]]] = (),
) -> T:
    """Read a recipe into `schema`.

    Args:
        schema: A frozen dataclass. Its fields are bool, int, float, str, None, `Literal`, unions, lists, tuples,
            `dict[str, T]`, `Any` (plain data), dataclasses, and tagged unions of dataclasses: classes that share a
            field whose type is a `Literal` of one value, another in each (`strategy: Literal["ddp"] = "ddp"`).
            A `ValueError` or `TypeError` from `__post_init__` becomes a mistake; a message of the form
            "FIELD: what is wrong" (or "FIELD.FIELD: ...") is placed at that field.
        source: The path of the file; with `text`, only the name that mistakes show.
        overrides: Values that win over the file, later ones over earlier ones.
        text: The recipe itself, in place of the contents of `source`.
        checks: Called with a recipe in which nothing else is wrong; what they yield is reported where it was written.
        rewrite: Makes a recipe of this schema of one in other words; what it cannot, it adds to the log. A `_target_`
            that it leaves is refused.

    Raises:
        RecipeError: The recipe or the overrides have mistakes; it tells all of them.
        TypeError: The schema itself is wrong.
    """
    if not (isinstance(schema, type) and is_dataclass(schema)):
        raise TypeError(f"a schema is a dataclass, not {schema!r}")
    log = MistakeLog()
    root = _load(str(source), text, schema, log)
    values = [(override, value_node(override, log)) for override in overrides]
    if root is None:
        log.raise_mistakes()
    for override, value in values:
        root = put(root, override, value, schema, log)
    root = refuse_targets(rewrite(root, log) if rewrite else root, (), log)
    recipe = Structurer(schema, log).read_recipe(root)
    for check in checks if not log.mistakes else ():
        for problem in check(recipe):
            place = place_at(root, problem.path, of_key=problem.at_key, about=problem.message)
            log.add(place, problem.path, problem.message, problem.suggestion)
    if log.mistakes:
        log.raise_mistakes()
    return recipe


def _load(file: str, text: str | None, schema: type, log: MistakeLog) -> MapNode | None:
    """The tree of the file; None, with the reason in `log`, if there is none, or it is not a mapping."""
    text = load_text(file, log) if text is None else check_text(text, Place(file, 1, 1), log)
    if text is None:
        return None
    root = compose(text, locate_in(file), log).root
    if isinstance(root, MapNode):
        return root
    if root is not None and not isinstance(root, RefusedNode):
        required = ", ".join(repr(name) for name, field in fields_of(schema).items() if field.required)
        empty = isinstance(root, ScalarNode) and root.plain and not root.text
        remedy = f"; a recipe has at least {required}" if empty and required else ""
        log.add(root.place, (), f"expected a mapping, got {got(root)}{remedy}")
    return None
