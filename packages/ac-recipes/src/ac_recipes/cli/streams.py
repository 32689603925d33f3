"""Standard output and standard error as a command finds them: closed, full, without a reader, in another encoding."""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

STANDARD_OUTPUT = "standard output"


@contextmanager
def standard_streams() -> Iterator[None]:
    """For the time of a command, let it print whatever it has to say.

    A stream that was closed (`>&-`), which Python has as None, takes everything and keeps nothing. Standard output
    shows a character that its encoding lacks as its escape, as standard error does, and names itself in the `OSError`
    of a write that fails, as a file does.
    """
    before = sys.stdout
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere(descriptor))
    output = _Output.of(sys.stdout) if before is not None and before is sys.__stdout__ else None
    sys.stdout = sys.stdout if output is None else output
    try:
        yield
    finally:
        if output is not None:
            output.detach()  # else what is beneath is closed with it
            sys.stdout = before


class _Output(io.TextIOWrapper):
    @classmethod
    def of(cls, stream: TextIO) -> "_Output | None":
        """`stream`, a text layer over bytes, with another in place of that layer; None if it is no such."""
        if not isinstance(stream, io.TextIOWrapper):
            return None
        return cls(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )

    def write(self, text: str) -> int:
        with _named():
            return super().write(text)

    def flush(self) -> None:
        with _named():
            super().flush()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = STANDARD_OUTPUT
        raise


def _nowhere(descriptor: int) -> TextIO:
    """A stream to nowhere, over `descriptor` if that is free: the next file to be opened would get it, and with it what
    libraries print."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(null, descriptor)
    return open(null, "w", encoding="utf-8", closefd=False)


def give_up_broken() -> bool:
    """Give up those of the standard streams whose reader is gone; whether there was one."""
    found = False
    for stream in (sys.stdout, sys.stderr):
        look = select.poll()
        look.register(stream.fileno(), 0)  # of errors alone, as of a pipe without a reader, it tells unasked
        if look.poll(0):
            give_up(stream)
            found = True
    return found


def give_up(stream: TextIO) -> None:
    """Let `stream` lead to nowhere, so that the end of Python does not complain of what is left in it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
