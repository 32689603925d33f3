"""Did you mean ...? Guesses at what a misspelt name was meant to be."""

import difflib
import re
from collections.abc import Iterable

_CUTOFF = 0.6  # difflib's own default: 'selctive' finds 'selective' (0.94), 'full' does not find 'budget' (0.2)
_LONGEST = 100  # matching is quadratic in length, and no field or choice is longer


def closest(word: str, options: Iterable[str], cutoff: float = _CUTOFF) -> str | None:
    """The option most like `word`, or None. Case, and `-` for `_`, do not count as differences."""
    if len(word) > _LONGEST:
        return None
    known = {_plain(option): option for option in reversed(list(options))}
    match = difflib.get_close_matches(_plain(word), known, n=1, cutoff=cutoff)
    return known[match[0]] if match else None


def closest_named_in(message: str) -> str | None:
    """The best guess from a component's own message of the form `'trition' is not one of 'auto', 'triton'`, or None."""
    told = re.search(r"'([^']*)' is not one of (.*)", message)
    return closest(told[1], re.findall(r"'([^']*)'", told[2])) if told else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
