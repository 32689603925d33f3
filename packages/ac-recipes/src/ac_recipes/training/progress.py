"""The live line of a run on a terminal: how far it is, and its newest figures."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class LiveProgress:
    """A bar under the lines that a run prints. It is gone when the run ends; the lines stay."""

    def __init__(self, stream: TextIO, done: int, of: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(file=stream, highlight=False),
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("", completed=done, total=of, figures="")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw it for the time of the context."""
        with self._progress:
            yield

    def line(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def update(self, done: int, figures: str) -> None:
        """After `done` steps, with their figures in words."""
        self._progress.update(self._task, completed=done, figures=figures)
