"""What plain text means: null, a boolean, a number or a string.

YAML 1.1 (PyYAML), YAML 1.2 and Python disagree on some texts: `1e-4` is a string in one, `010` is eight in another,
`12:30` is 750 in a third. Here a text has one meaning, and texts on which readers disagree in silence are `DOUBTFUL`:
they are refused with a remedy unless quoted.
"""

import json
import math
import re
from collections.abc import Iterator
from enum import Enum, auto

from ac_recipes.reader.mistakes import cut
from ac_recipes.reader.nodes import ScalarNode
from ac_recipes.reader.schema import Shape

UNREAD = object()
"""In place of a value that could not be read (None is a value)."""


class Kind(Enum):
    NULL = auto()
    BOOL = auto()
    INT = auto()
    FLOAT = auto()
    STRING = auto()
    DOUBTFUL = auto()


NUMBERS = (Kind.INT, Kind.FLOAT)

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {spelt for word in ("true", "yes", "on") for spelt in (word, word.capitalize(), word.upper())}
_FALSE = {spelt for word in ("false", "no", "off") for spelt in (word, word.capitalize(), word.upper())}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_OTHER_BASE = re.compile(r"[-+]?0[xob][0-9a-f_]+", re.IGNORECASE)
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)
_MOST_DIGITS = 300  # fits a float, and Python refuses to read integers of more than 4300


def kind_of(text: str) -> Kind:
    """What unquoted `text` is."""
    if text in _NULL:
        return Kind.NULL
    if text in _TRUE or text in _FALSE:
        return Kind.BOOL
    if doubt(text):
        return Kind.DOUBTFUL
    if _INT.fullmatch(text):
        return Kind.INT
    return Kind.FLOAT if _FLOAT.fullmatch(text) else Kind.STRING


def doubt(text: str) -> str | None:
    """Why unquoted `text` looks like a number but is not read as one; None when there is no doubt."""
    if _LEADING_ZERO.fullmatch(text):
        return "a leading zero means octal to some readers"
    if _OTHER_BASE.fullmatch(text):
        return "numbers are read in decimal only"
    if _NOT_FINITE.fullmatch(text):
        return "a number must be finite"
    if _INT.fullmatch(text):
        return f"a number has at most {_MOST_DIGITS} digits" if len(text) > _MOST_DIGITS else None
    if _FLOAT.fullmatch(text) and not math.isfinite(_float(text)):
        return "the number is too large"
    return None


def quoted(text: str) -> str:
    """`text` as a message shows it quoted: by YAML's rules, on one line, cut when long."""
    return cut("'" + text.replace("'", "''") + "'" if text.isprintable() else json.dumps(text))


def read_scalar(shape: Shape, node: ScalarNode) -> object:
    """The value of `node` where `shape` is expected, or `UNREAD`."""
    kind = kind_of(node.text) if node.plain else Kind.STRING
    if shape.anything:
        return _read_core(node.text, kind)
    return next(_readings(shape, node, kind), UNREAD)


def _readings(shape: Shape, node: ScalarNode, kind: Kind) -> Iterator[object]:
    """All that `node` may mean where `shape` is expected, the narrowest first."""
    text = node.text
    if kind is Kind.NULL and shape.null and text:  # nothing at all, as an unset variable leaves it, turns nothing off
        yield None
    if kind is Kind.BOOL and shape.boolean:
        yield text in _TRUE
    yield from (choice for choice in shape.choices if _is_choice(choice, text, kind))
    if kind is Kind.INT and shape.integer:
        yield _int(text)
    if kind in NUMBERS and shape.number:
        yield _float(text)
    # The schema settles what YAML leaves open: where only the choice '16' or 'off' can be meant, it needs no quotes.
    if node.plain and text in shape.choices:
        yield text
    if kind is Kind.STRING and shape.string:
        yield text


def _read_core(text: str, kind: Kind) -> object:
    """Where anything may stand, YAML 1.2's core rules: `yes` and `on` are strings there, and so are dates."""
    match kind:
        case Kind.NULL:
            return None
        case Kind.BOOL:
            return text in _TRUE if text.lower() in ("true", "false") else text
        case Kind.INT:
            return _int(text)
        case Kind.FLOAT:
            return _float(text)
        case Kind.STRING:
            return text
    return UNREAD


def _is_choice(choice: str | int | bool, text: str, kind: Kind) -> bool:
    match choice:
        case bool():  # before int: to Python a bool is one
            return kind is Kind.BOOL and choice is (text in _TRUE)
        case int():
            return kind is Kind.INT and choice == _int(text)
    return kind is Kind.STRING and choice == text


def _int(text: str) -> int:
    return int(text.replace("_", ""))


def _float(text: str) -> float:
    return float(text.replace("_", ""))
