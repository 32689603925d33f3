"""Counters of the recompute cache in this process, over all threads."""

import dataclasses
import threading
import weakref
from collections import Counter, deque


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of the counters; see `stats`."""

    stored: int = 0
    """Combine outputs kept since the last reset. One that several nested regions share counts once."""

    stored_bytes: int = 0
    """Bytes of those, `tokens * hidden * itemsize` each."""

    served: int = 0
    """Combines that a recompute answered from what was kept."""

    collectives_skipped: int = 0
    """Collectives that those would have run."""

    live_entries: int = 0
    """Combine outputs held at this moment. Not reset."""

    live_bytes: int = 0
    """Bytes of those. Not reset."""


class _Recorder:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Counter[str]()
        # Sizes of entries that died and are not yet counted out. Entries die wherever their last reference goes, maybe
        # in a garbage collection inside a section locked below: a finalizer may append here, but not take the lock.
        self._died: deque[int] = deque()

    def kept(self, entry: object, nbytes: int) -> None:
        """Counts `entry`, which holds `nbytes`, as stored, and as live until nothing refers to it."""
        with self._lock:
            self._totals.update(stored=1, stored_bytes=nbytes, live_entries=1, live_bytes=nbytes)
            self._count_out()
        weakref.finalize(entry, self._died.append, nbytes).atexit = False

    def served(self, collectives: int) -> None:
        with self._lock:
            self._totals.update(served=1, collectives_skipped=collectives)

    def snapshot(self) -> Stats:
        with self._lock:
            self._count_out()
            return Stats(**self._totals)

    def reset(self) -> None:
        with self._lock:
            for name in ("stored", "stored_bytes", "served", "collectives_skipped"):
                self._totals[name] = 0

    def _count_out(self) -> None:
        while self._died:
            self._totals.update(live_entries=-1, live_bytes=-self._died.popleft())


recorder = _Recorder()


def stats() -> Stats:
    """What the recompute cache did in this process since `reset_stats`, and what it holds now.

    `stored > 0` with `served == 0` after a backward means that the cache only costs memory there: PyTorch's early
    stop ended each recompute before it reached the combine. See "When it pays" in the README.
    """
    return recorder.snapshot()


def reset_stats() -> None:
    """Sets the counters to zero. `live_entries` and `live_bytes` describe memory in use and stay."""
    recorder.reset()
