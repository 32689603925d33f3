"""What a run shows: the asked -> applied table, one line every few steps, and on a terminal a live line below."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ac_recipes.tables import is_lively, table_text
from ac_recipes.training.progress import LiveProgress

GIB = 2**30
Row = tuple[str, str, str, str]


class RunConsole:
    """Prints for rank 0 and stays silent on the others.

    Colour and the live line are for terminals: none of them when the output is piped, `NO_COLOR` is set or the terminal
    is a dumb one.
    """

    def __init__(self, *, silent: bool, to_stderr: bool = False) -> None:
        self._stream: TextIO = sys.stderr if to_stderr else sys.stdout
        self._silent = silent
        self._live: LiveProgress | None = None

    def line(self, text: str) -> None:
        """One line, at once."""
        if self._silent:
            return
        if self._live is not None:
            self._live.line(text)
            return
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:  # the reader, such as `head`, has what it wants: the training goes on
            self._silent = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def asked_applied(self, rows: list[Row]) -> None:
        """The table of what was asked for and what was applied: `(setting, asked, applied, detail)`."""
        self.line(table_text(("setting", "asked", "applied", "detail"), rows, self._stream))

    @contextmanager
    def progress(self, done: int, of: int) -> Iterator[None]:
        """Show the live line for the time of the context, where there is a terminal to show it on."""
        if self._silent or not is_lively(self._stream):
            yield
            return
        self._live = LiveProgress(self._stream, done, of)
        try:
            with self._live.shown():
                yield
        finally:
            self._live = None

    def step(
        self, step: int, of: int, *, loss: float, grad_norm: float, lr: float, peak_bytes: int, rate: float, line: bool
    ) -> None:
        """One optimizer step, in the live line and, if asked, in a `line` of its own.

        `peak_bytes`: the largest of all ranks. `rate`: tokens a second over all ranks.
        """
        figures = (
            f"loss {loss:.4f} | grad_norm {grad_norm:.2f} | lr {lr:.2e} | mem {peak_bytes / GIB:.2f} GiB "
            f"| {rate:,.0f} tokens/s"
        )
        if line:
            self.line(f"step {step:>{len(str(of))}}/{of} | {figures}")
        if self._live is not None:
            self._live.update(step, figures)
