"""Stopping on request: a run that is told to end saves at the end of its step and ends well."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ac_recipes.launch import STOP_FILE
from ac_recipes.training.ranks import Ranks

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether this run was told to end, by SIGTERM or SIGINT to any of its processes."""

    def __init__(self) -> None:
        self._signum = 0
        name = os.environ.get(STOP_FILE)
        self._file = Path(name) if name else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first signal is a request, for `agreed` to find; the second does what the first would have done before.

        Only a process's main thread hears signals. A run in another thread ends as its process decides.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.getsignal(signum) or signal.SIG_DFL for signum in _SIGNALS}

        def request(signum: int, _frame: FrameType | None) -> None:
            self._signum = signum
            for each in _SIGNALS:
                signal.signal(each, before[each])

        for signum in _SIGNALS:
            signal.signal(signum, request)
        try:
            yield
        finally:
            for signum in _SIGNALS:
                signal.signal(signum, before[signum])

    def agreed(self, ranks: Ranks) -> signal.Signals | None:
        """The signal that any rank was sent; the same answer on all of them, so that they end after the same step."""
        signum = int(ranks.max(self._signum or self._left_by_launcher()))
        return signal.Signals(signum) if signum else None

    def _left_by_launcher(self) -> int:
        if self._file is None or not self._file.exists():
            return 0
        return int(self._file.read_text() or 0)
