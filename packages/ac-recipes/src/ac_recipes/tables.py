"""Tables in text, and whether a stream is a terminal on which more than plain text is welcome. Loads without rich."""

import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

_WIDTH = 160
"""Columns of a table that is piped: wide enough to keep a row on one line."""


def is_lively(stream: TextIO) -> bool:
    """Whether `stream` takes colour and lines that change: no pipe, no dumb terminal, and `NO_COLOR` is not set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return stream.isatty() and not plain


def table_text(
    columns: Sequence[str], rows: Iterable[Sequence[str]], stream: TextIO, *, numbers: Sequence[str] = ()
) -> str:
    """A table for `stream`, ruled by spaces alone; its heading is bold where `stream` is lively.

    numbers: the columns that are set flush right.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for row in rows:
        table.add_row(*map(str, row))
    lively = is_lively(stream)
    text = io.StringIO()
    width = None if stream.isatty() else _WIDTH  # None: that of the terminal
    console = Console(
        file=text, width=width, force_terminal=lively, no_color=not lively, highlight=False, markup=False, emoji=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """The same on standard output."""
    print(table_text(columns, rows, sys.stdout, numbers=numbers))
