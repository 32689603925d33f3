"""A recipe's text: bounded, UTF-8, and read once."""

import codecs
from pathlib import Path

from ac_recipes.reader.mistakes import MistakeLog, Place

MAX_BYTES = 1 << 20
"""1 MiB. Real recipes have a few KiB; a bound keeps a wrong path (a checkpoint, /dev/zero) from filling memory."""

_OTHER_UNICODE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # BOM_UTF32_LE begins with the first
_TOO_LARGE = f"a recipe has at most {MAX_BYTES >> 20} MiB; this is more"


def load_text(source: str | Path, log: MistakeLog) -> str | None:
    """The text of the file `source`, or None with the reason in `log`."""
    start = Place(str(source), 1, 1)
    try:
        with open(source, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        log.add(start, (), f"cannot read the recipe: {error.strerror or error}")
    except ValueError as error:  # a path with a NUL in it
        log.add(start, (), f"cannot read the recipe: {error}")
    else:
        return _decode(data, start, log)
    return None


def check_text(text: str, start: Place, log: MistakeLog) -> str | None:
    """`text` if it can be a recipe, else None with the reason in `log`."""
    if len(text) > MAX_BYTES:
        log.add(start, (), _TOO_LARGE)
    elif text.startswith("\ufeff"):
        log.add(start, (), "the recipe begins with a byte order mark; save it as UTF-8 without one")
    else:
        return text
    return None


def place_at(file: str, text: str, index: int) -> Place:
    """The place of character `index` of `text`."""
    return Place(file, text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


def _decode(data: bytes, start: Place, log: MistakeLog) -> str | None:
    if len(data) > MAX_BYTES:
        log.add(start, (), _TOO_LARGE)
    elif data.startswith(_OTHER_UNICODE):
        log.add(start, (), "the recipe is UTF-16 or UTF-32; save it as UTF-8")
    else:
        try:
            return check_text(data.decode(), start, log)
        except UnicodeDecodeError as error:
            readable = data[: error.start].decode()
            place = place_at(start.file, readable, len(readable))
            log.add(place, (), f"byte 0x{data[error.start]:02x} is not UTF-8; save the recipe as UTF-8")
    return None
