"""Stopping on request: a run that is told to end saves at the end of its step and ends well."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from ac_recipes.launch import STOP_FILE
from ac_recipes.training.ranks import Ranks

_PROCESS_ENDS = ContextVar("_PROCESS_ENDS", default=False)


@contextmanager
def process_ends_with_run() -> Iterator[None]:
    """Around a run with which this process ends, as a command does: one that was told to stop hears no SIGTERM until
    the process is gone. A second one would have it reported as failed, though all is saved."""
    token = _PROCESS_ENDS.set(True)
    try:
        yield
    finally:
        _PROCESS_ENDS.reset(token)


class StopRequest:
    """Whether this run was told to end, by SIGTERM or SIGINT to any of its processes."""

    def __init__(self) -> None:
        self._signum = 0
        name = os.environ.get(STOP_FILE)
        self._file = Path(name) if name else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first signal is a request, for `agreed` to find. Another SIGTERM says nothing new, as when a scheduler
        repeats it; another SIGINT, a second Ctrl-C, does what the first would have done before.

        Only a process's main thread hears signals. A run in another thread ends as its process decides.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[signal.Signals, Any] = {
            signum: signal.getsignal(signum) or signal.SIG_DFL for signum in (signal.SIGTERM, signal.SIGINT)
        }

        def request(signum: int, _frame: FrameType | None) -> None:
            self._signum = self._signum or signum
            signal.signal(signal.SIGINT, before[signal.SIGINT])

        for signum in before:
            signal.signal(signum, request)
        try:
            yield
        finally:
            if self._signum and _PROCESS_ENDS.get():
                before[signal.SIGTERM] = signal.SIG_IGN
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def agreed(self, ranks: Ranks) -> signal.Signals | None:
        """The signal that any rank was sent; the same answer on all of them, so that they end after the same step."""
        self._signum = int(ranks.max(self._signum or self._left_by_launcher()))
        return signal.Signals(self._signum) if self._signum else None

    def _left_by_launcher(self) -> int:
        if self._file is None or not self._file.exists():
            return 0
        return int(self._file.read_text() or 0)
