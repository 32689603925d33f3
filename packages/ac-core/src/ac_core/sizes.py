"""Bytes in words. Loads without torch."""

_UNITS = ((2**30, 10**9, "GiB", "GB"), (2**20, 10**6, "MiB", "MB"), (2**10, 10**3, "KiB", "kB"))


def size_text(count: float, *, like: float | None = None) -> str:
    """A number of bytes in the largest unit that leaves at least 1, the decimal one beside it: `1.50 GiB (1.61 GB)`.

    like: a number whose unit to take, so that the sizes of a table have one.
    """
    largest = abs(count if like is None else like)
    for binary, decimal, name, beside in _UNITS:
        if largest >= binary:
            return f"{count / binary:.2f} {name} ({count / decimal:.2f} {beside})"
    return f"{count:.0f} B"


def counted(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`: of a noun whose plural has an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
