"""Mistakes are data. They are collected while reading, and only `str()` makes a sentence of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

COMMAND_LINE = "command line"
"""The `file` of a mistake that an override made."""

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of the recipe down to a value."""


class Place(NamedTuple):
    """Where something was written; line and column count from 1."""

    file: str
    line: int
    column: int


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One thing that is wrong with a recipe, and where.

    Attributes:
        file: The recipe as the caller named it, or `COMMAND_LINE`.
        line: Counts from 1; 1 on the command line.
        column: Counts from 1 in characters; on the command line, the offset of the flag in the space-joined arguments.
        path: The value's dotted path (`optimizer.betas[1]`); empty for the recipe as a whole.
        message: What is wrong, in one line, without place and suggestion.
        suggestion: What was probably meant: a field, a choice, or the dotted path of a field in another section.
    """

    file: str
    line: int
    column: int
    path: str
    message: str
    suggestion: str | None = None

    def __str__(self) -> str:
        path = f"{self.path}: " if self.path else ""
        hint = f"; did you mean {self.suggestion!r}?" if self.suggestion is not None else ""
        return f"{self.file}:{self.line}:{self.column}: {path}{self.message}{hint}"


class RecipeError(ValueError):
    """A recipe, or its overrides, cannot be read. `str()` gives one line a mistake, `mistakes` the mistakes as data."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(self.mistakes)  # and not the text: unpickling calls the class with these arguments

    def __str__(self) -> str:
        return "\n".join(map(str, self.mistakes))


class MistakeLog:
    """Collects mistakes, so that reading can go on after the first."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def add(self, place: Place, path: KeyPath, message: str, suggestion: str | None = None) -> None:
        self.mistakes.append(
            Mistake(**place._asdict(), path=show_path(path), message=message, suggestion=suggestion),
        )

    def amend(self, remedy: str) -> None:
        """Add a remedy to the last mistake, by one who knows more about its cause."""
        last = self.mistakes[-1]
        self.mistakes[-1] = replace(last, message=f"{last.message}; {remedy}")

    def raise_mistakes(self) -> NoReturn:
        """Raise `RecipeError` with what was collected, in reading order: the file from the top, then the flags."""
        raise RecipeError(sorted(self.mistakes, key=lambda m: (m.file == COMMAND_LINE, m.line, m.column)))


def show_path(path: KeyPath) -> str:
    """`("optimizer", "betas", 1)` as `optimizer.betas[1]`; a key that is no plain word is shown quoted, in brackets."""
    shown = ""
    for part in path:
        if isinstance(part, str) and re.fullmatch(r"[\w-]+", part):
            shown += f".{cut(part)}" if shown else cut(part)
        else:
            shown += f"[{short(part)}]"
    return shown


def short(value: object, limit: int = 60) -> str:
    """`repr(value)` on one line, cut when long: a message echoes a value, it does not print it."""
    return cut(repr(value), limit)


def cut(text: str, limit: int = 60) -> str:
    """`text` with its middle left out if it has more than `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 10]}...{text[-7:]}"


def one_line(message: str) -> str:
    """`message` with every run of whitespace made one space: a mistake is one line of output."""
    return " ".join(message.split())
