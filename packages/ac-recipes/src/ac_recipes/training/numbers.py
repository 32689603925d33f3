"""Numbers as JSON has them: it has none that is not finite, and Python would write a bare `NaN` that other readers
refuse."""

import math


def json_number(value: float | None) -> float | str | None:
    """`value`, or "NaN", "Infinity" or "-Infinity", which `float` reads back: `null` would say that it is not known."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
