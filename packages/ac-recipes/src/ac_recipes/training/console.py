"""What a run shows: the asked -> applied table, and one line a step."""

import io
import os
import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table

GIB = 2**30
Row = tuple[str, str, str, str]


class RunConsole:
    """Prints for rank 0 and stays silent on the others. Plain text, without colour, when the output is piped."""

    def __init__(self, *, silent: bool, to_stderr: bool = False) -> None:
        self._stream: TextIO = sys.stderr if to_stderr else sys.stdout
        self._silent = silent

    def line(self, text: str) -> None:
        """One line, at once."""
        if self._silent:
            return
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:  # the reader, such as `head`, has what it wants: the training goes on
            self._silent = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def asked_applied(self, rows: list[Row]) -> None:
        """The table of what was asked for and what was applied: `(setting, asked, applied, detail)`."""
        if self._silent:
            return
        console = Console(highlight=False, file=io.StringIO(), width=140)
        if self._stream.isatty():
            console = Console(file=self._stream, highlight=False)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("setting", "asked", "applied", "detail"):
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        if isinstance(console.file, io.StringIO):
            self.line("\n".join(line.rstrip() for line in console.file.getvalue().splitlines()))

    def step(
        self, step: int, of: int, *, loss: float, grad_norm: float, lr: float, peak_bytes: int, rate: float
    ) -> None:
        """One optimizer step; `peak_bytes` over all ranks, `rate` in tokens a second over all ranks."""
        self.line(
            f"step {step:>{len(str(of))}}/{of} | loss {loss:.4f} | grad_norm {grad_norm:.2f} | lr {lr:.2e} "
            f"| mem {peak_bytes / GIB:.2f} GiB | {rate:,.0f} tokens/s"
        )
