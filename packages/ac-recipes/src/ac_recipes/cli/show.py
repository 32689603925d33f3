"""Sizes, progress and pictures of the commands that look at a recipe."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from ac_recipes.automodel import Translator, left_out_text
from ac_recipes.errors import RunError, UsageError
from ac_recipes.extras import install
from ac_recipes.load import load_translated
from ac_recipes.parallel.config import compile_config
from ac_recipes.reader import Override
from ac_recipes.recipe import Recipe
from ac_recipes.tables import is_lively


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
    if not is_lively(sys.stderr):
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


def recipe_to_look_at(name: str, overrides: Sequence[Override]) -> Recipe:
    """The recipe; what of one of NeMo AutoModel is left out is told on standard error. Raises as `load_recipe`."""
    recipe, translator = load_translated(name, overrides)
    tell_left_out(translator, sys.stderr)
    return recipe


def tell_left_out(translator: Translator, stream: TextIO) -> None:
    """Print what a translated recipe said and is not done, or not quite the same."""
    if text := left_out_text(translator):
        print(text, file=stream, flush=True)


def uncompiled_note(recipe: Recipe, why: str) -> str:
    """What to say of a recipe that compiles its blocks, by a command that does not; empty for any other recipe."""
    if compile_config(recipe.compile) is None:
        return ""
    return f"compile: the recipe compiles its blocks, and this command does not: {why}"


def recipe_argument(parser: Any) -> None:
    """The recipe that a command looks at."""
    parser.add_argument("recipe", metavar="RECIPE", help="a file, or the name of a shipped recipe")


def picture_argument(parser: Any, what: str) -> None:
    """`--picture FILE`."""
    parser.add_argument("--picture", metavar="FILE", help=f"draw {what}: FILE ends in .svg, .html or .png")


def overwrite_argument(parser: Any) -> None:
    """`--overwrite`, of a command that writes files which the user names."""
    parser.add_argument("--overwrite", action="store_true", help="write a named file also where there is one already")


def check_picture(path: str | None, *, overwrite: bool) -> None:
    """Refuse a picture that cannot be written, before the work for it is done.

    Raises:
        UsageError: naming the file.
    """
    if path is None:
        return
    if Path(path).suffix not in (".svg", ".html", ".png"):
        raise UsageError(f"--picture: {path!r} ends in none of .svg, .html, .png")
    if path.endswith(".png") and find_spec("matplotlib") is None:
        raise UsageError(f"--picture: a .png needs matplotlib ({install('matplotlib')}); .svg and .html need nothing")
    check_output("--picture", path, overwrite=overwrite)


def draw(save: Callable[[str], object], path: str) -> None:
    """Have a picture saved.

    Raises:
        RunError: it cannot be written.
    """
    try:
        save(path)
    except OSError as error:
        raise RunError(f"--picture: cannot write {path}: {error.strerror or error}") from error


def check_output(flag: str, path: str, *, overwrite: bool) -> None:
    """Refuse a file that cannot be written, or that is there already, before the work for it is done.

    Raises:
        UsageError: naming the file and what can be done.
    """
    if not path.strip():
        raise UsageError(f"{flag}: the name of the file is empty, as an unset variable leaves it; give one")
    if not Path(path).parent.is_dir():
        raise UsageError(f"{flag}: there is no folder {Path(path).parent}")
    if Path(path).is_dir():
        raise UsageError(f"{flag}: {path} is a folder")
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{flag}: {path} is there already; give another name, or --overwrite")
