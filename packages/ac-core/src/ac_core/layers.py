"""The `layers` setting: which blocks of a part, by position, by stride or by name. Loads without torch."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

_EVERY = re.compile(r"every:([1-9]\d*)")
_ITEM = re.compile(r"(?P<one>-?\d+)|(?P<low>\d+)-(?P<high>\d*)|(?P<start>-?\d*):(?P<stop>-?\d*)")
_SYNTAX = (
    "positions and ranges such as '0-7,12-', '-2:' (the last two) or '3'; 'every:2'; or a glob over block names such "
    "as 'model.layers.*'"
)


def check_layers(text: str) -> str | None:
    """What is wrong with the text of a `layers` setting, or None."""
    if not isinstance(text, str) or not text.strip():
        return f"{text!r} is not one of: {_SYNTAX}"
    if _EVERY.fullmatch(text) or _is_glob(text):
        return None
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            return f"{item.strip()!r} in {text!r} is not one of: {_SYNTAX}"
        if match["high"] and int(match["low"]) > int(match["high"]):
            return f"{item.strip()!r} in {text!r} is empty: it ends before it begins"
    return None


def select_layers(text: str, names: Sequence[str]) -> list[int]:
    """The positions among `names`, the blocks of one part in order, that a valid `text` selects.

    Raises:
        ValueError: a position, a range or a glob that selects nothing here, or a stride over all blocks, with what
            there is.
    """
    if every := _EVERY.fullmatch(text):
        if int(every[1]) > len(names):  # a mistake about the model's depth, as a position outside of it
            raise ValueError(f"{text!r} is a stride over all of the {len(names)} blocks; for the first alone write '0'")
        return list(range(0, len(names), int(every[1])))
    if _is_glob(text):
        hits = [i for i, name in enumerate(names) if fnmatchcase(name, text)]
        if not hits:
            raise ValueError(f"{text!r} matches none of the {len(names)} blocks, from {names[0]!r} to {names[-1]!r}")
        return hits
    hits = []
    for item in text.split(","):
        positions = _positions(item.strip(), len(names))
        if not positions or not all(0 <= position < len(names) for position in positions):
            raise ValueError(f"{item.strip()!r} in {text!r} is outside of the {len(names)} blocks 0-{len(names) - 1}")
        hits += positions
    return sorted(set(hits))


def _positions(item: str, count: int) -> list[int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(check_layers(item))
    if match["one"]:
        one = int(match["one"])
        return [one + count if one < 0 else one]
    if match["low"]:
        high = int(match["high"]) if match["high"] else count - 1
        return list(range(int(match["low"]), high + 1))
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    # Slices as in Python, but none that reaches over the ends: that is a mistake about the model's depth.
    if any(bound is not None and not -count <= bound <= count for bound in (start, stop)):
        return []
    return list(range(count))[start:stop]


def _is_glob(text: str) -> bool:
    return bool(re.search(r"[A-Za-z_*?\[]", text)) and not text.startswith("every:")
