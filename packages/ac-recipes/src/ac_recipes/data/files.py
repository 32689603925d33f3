"""The text files of a recipe: read here, refused here."""

from pathlib import Path

from ac_recipes.errors import UsageError


def read_text(name: str) -> str:
    """The text of a file.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        return read_bytes(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})") from error


def read_bytes(name: str) -> bytes:
    """The bytes of a file.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{name!r} is no name of a file: {error}") from error
