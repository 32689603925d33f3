"""Says what was expected, what was found and what mends it.

* `expected true, false, null, one of 'none', 'full', or a mapping; got 'ful'`
* `expected a string, got the number 123; quote it: '123'`
"""

import re

from ac_recipes.reader.mistakes import cut, short
from ac_recipes.reader.nodes import ListNode, Node, ScalarNode
from ac_recipes.reader.scalars import NUMBERS, UNREAD, Kind, doubt, kind_of, quoted, read_scalar
from ac_recipes.reader.schema import Shape
from ac_recipes.reader.suggest import closest


def unexpected(shape: Shape, node: Node) -> tuple[str, str | None]:
    """The message for a `node` that `shape` does not allow, and a suggestion when a word was probably meant."""
    wanted = expected(shape)
    message = f"expected {wanted}{';' if ',' in wanted else ','} got {got(node)}"
    if not isinstance(node, ScalarNode):
        return message, None
    remedy = _remedy(shape, node)
    return (f"{message}; {remedy}", None) if remedy else (message, _meant(shape, node.text))


def expected(shape: Shape) -> str:
    """The members of a union in words, always in the same order."""
    if shape.anything:
        return "plain data"
    words = ["true", "false"] if shape.boolean else []
    words += ["null"] if shape.null else []
    if shape.choices:
        listed = ", ".join(map(_show_choice, shape.choices))
        words.append(f"one of {listed}" if len(shape.choices) > 1 else listed)
    if shape.number:
        words.append("a number")
    elif shape.integer:
        words.append("an integer")
    words += ["a string"] if shape.string else []
    words += ["a list"] if shape.lists else []
    words += ["a mapping"] if shape.classes or shape.dicts else []
    if len(words) < 3:
        return " or ".join(words)
    return ", ".join(words[:-1]) + f", or {words[-1]}"


def got(node: Node) -> str:
    """What stands at `node`, as it was written."""
    match node:
        case ListNode():
            return "a list"
        case ScalarNode(plain=True, text=""):
            return "nothing"
        case ScalarNode(plain=True) if kind_of(node.text) in NUMBERS:
            return f"the number {cut(node.text)}"
        case ScalarNode(plain=True) if kind_of(node.text) in (Kind.NULL, Kind.BOOL):
            return node.text
        case ScalarNode():
            return short(node.text)
    return "a mapping"


def _meant(shape: Shape, text: str) -> str | None:
    choices = [choice for choice in shape.choices if isinstance(choice, str)]
    if shape.null and text.lower() == "none":
        return "null"  # Python's word for it is too far from YAML's for `closest`
    words = ["true", "false"] if shape.boolean else []
    words += ["null"] if shape.null else []
    return closest(text, [*choices, *words])


def _remedy(shape: Shape, node: ScalarNode) -> str | None:
    if not node.plain:
        reads_unquoted = read_scalar(shape, ScalarNode(node.place, node.text, plain=True)) is not UNREAD
        return "remove the quotes" if reads_unquoted else None
    if shape.classes and (pair := re.fullmatch(r"(\w+):(\S.*)", node.text)):
        return f"YAML has a space after the colon: '{pair[1]}: {pair[2]}'"
    of_strings = any(option.item is str for option in shape.lists)
    if of_strings and kind_of(node.text) is Kind.STRING and not _meant(shape, node.text):
        return f"write a list: [{node.text}]"
    reason = doubt(node.text)
    reasons = [reason] if reason else []
    if shape.string or shape.anything:
        reasons.append(f"quote it: {quoted(node.text)}")
    return "; ".join(reasons)


def _show_choice(choice: str | int | bool) -> str:
    return str(choice).lower() if isinstance(choice, bool) else repr(choice)
