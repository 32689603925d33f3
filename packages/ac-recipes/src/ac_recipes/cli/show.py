"""Tables, sizes and progress of the commands that look at a recipe."""

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ac_recipes.errors import RunError, UsageError

_WIDTH = 160
"""Columns of a table that is piped: wide enough to keep a row on one line."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """A table on standard output; without colour and ruled by spaces alone when it is piped.

    numbers: the columns that are set flush right.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for row in rows:
        table.add_row(*map(str, row))
    if sys.stdout.isatty():
        Console(highlight=False, markup=False).print(table)
        return
    text = io.StringIO()
    Console(highlight=False, markup=False, file=text, width=_WIDTH).print(table)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


class Sizes:
    """Bytes of one table, in one unit: GiB with GB beside it, or MiB with MB where the largest is below a GiB."""

    def __init__(self, largest: int) -> None:
        small = largest < 2**30
        self._binary, self._decimal = (2**20, 10**6) if small else (2**30, 10**9)
        self.unit = "MiB (MB)" if small else "GiB (GB)"

    def __call__(self, count: float) -> str:
        return f"{count / self._binary:.2f} ({count / self._decimal:.2f})"


def flops(count: float) -> str:
    """FLOPs in the unit that leaves at least 1."""
    for name, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= unit:
            return f"{count / unit:.3g} {name}FLOP"
    return f"{count:g} FLOP"


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Any]:
    """Shows on standard error what is being done: a bar on a terminal, else a line each time.

    Yields a function that is told of what begins next.
    """
    if not sys.stderr.isatty():
        yield lambda step: print(f"{what}: {step}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = [] if total is None else [BarColumn()]
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), *bar, TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    ) as shown:  # fmt: skip
        task = shown.add_task(what, total=total)
        begun = False

        def step(text: str) -> None:
            nonlocal begun
            shown.update(task, description=f"{what}: {text}", advance=1 if begun and total else 0)
            begun = True

        yield step


def recipe_argument(parser: Any) -> None:
    """The recipe that a command looks at."""
    parser.add_argument("recipe", metavar="RECIPE", help="a file, or the name of a shipped recipe")


def picture_argument(parser: Any, what: str) -> None:
    """`--picture FILE`."""
    parser.add_argument("--picture", metavar="FILE", help=f"draw {what}: FILE ends in .svg, .html or .png")


def check_picture(path: str | None) -> None:
    """Refuse a picture that cannot be written, before the work for it is done.

    Raises:
        UsageError: naming the file.
    """
    if path is None:
        return
    if Path(path).suffix not in (".svg", ".html", ".png"):
        raise UsageError(f"--picture: {path!r} ends in none of .svg, .html, .png")
    if path.endswith(".png") and find_spec("matplotlib") is None:
        raise UsageError("--picture: a .png needs matplotlib (pip install matplotlib); .svg and .html need nothing")
    check_folder("--picture", path)


def draw(save: Callable[[str], object], path: str) -> None:
    """Have a picture saved.

    Raises:
        RunError: it cannot be written.
    """
    try:
        save(path)
    except OSError as error:
        raise RunError(f"--picture: cannot write {path}: {error.strerror or error}") from error


def check_folder(flag: str, path: str) -> None:
    """Refuse a file in a folder that is not there.

    Raises:
        UsageError: naming the folder.
    """
    if not Path(path).parent.is_dir():
        raise UsageError(f"{flag}: there is no folder {Path(path).parent}")
    if Path(path).is_dir():
        raise UsageError(f"{flag}: {path} is a folder")
