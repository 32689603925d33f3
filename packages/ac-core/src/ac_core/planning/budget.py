"""The `memory_budget` setting: how much memory a training step may take. Loads without torch."""

import re
from typing import Literal

Budget = int | float | Literal["device"]
"""Bytes, a fraction of what the step takes without checkpointing, or what the device has."""

_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT")
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_LEAST = 1024
_VALID = "a size such as '24GiB' or '24GB', a whole number of bytes, a fraction such as 0.5 or '50%', or 'device'"


def parse_budget(value: object) -> Budget:
    """What a budget says. `GiB` is 1024 to the third power, `GB` 1000 to the third.

    Raises:
        ValueError: it is none of the forms above, or one that can only be a slip, such as 24 bytes.
    """
    if value == "device":
        return "device"
    if isinstance(value, str):
        return _parse_text(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not {_VALID}")
    if isinstance(value, float):
        if not 0 < value <= 1:
            hint = f"; a size has a unit: '{value:g}GiB'" if 1 < value < _LEAST else ""
            raise ValueError(f"{value!r} is no fraction above 0 and up to 1{hint}")
        return value
    if value < _LEAST:
        hint = f"; give a unit: '{value}GiB'" if value > 0 else f"; give {_VALID}"
        raise ValueError(f"{value!r} would be bytes, too few for any model{hint}")
    return value


def _parse_text(text: str) -> Budget:
    if share := _PERCENT.fullmatch(text):
        if not 0 < float(share[1]) <= 100:
            raise ValueError(f"{text!r} is no share above 0% and up to 100% of what no checkpointing takes")
        return float(share[1]) / 100
    size = _SIZE.fullmatch(text)
    if size is None:
        number = re.fullmatch(r"\d+(?:\.\d+)?", text)
        hint = f"; write '{text}GiB', or '{text}' without quotes for a number" if number else ""
        raise ValueError(f"{text!r} is not {_VALID}{hint}")
    number, unit = size.groups()
    if unit not in _UNITS:
        meant = {"k": "kib", "m": "mib", "g": "gib", "t": "tib"}.get(unit.lower().removesuffix("i"), unit.lower())
        close = next((known for known in _UNITS if known.lower() == meant), None)
        hint = f"; did you mean {number}{close}?" if close else ""
        raise ValueError(f"{text!r} has no unit of memory: {', '.join(_UNITS)}{hint}")
    if (count := int(float(number) * _UNITS[unit])) < _LEAST:
        raise ValueError(f"{text!r} is too little for any model")
    return count
