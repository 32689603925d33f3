"""Counters of the recompute cache in this process, over all threads, in total and by layer."""

import dataclasses
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What the cache did for one layer, or for all."""

    stored: int = 0
    """Combine outputs kept since the last reset. One that several nested regions share counts once."""

    stored_bytes: int = 0
    """Bytes of those, `tokens * hidden * itemsize` each."""

    served: int = 0
    """Combines that a recompute answered from what was kept."""

    collectives_skipped: int = 0
    """Collectives that those would have run."""

    gemms_skipped: int = 0
    """Grouped GEMMs of down projections that a recompute did not run."""

    unserved: int = 0
    """Combine outputs that were freed without having been served: memory for nothing."""

    live_entries: int = 0
    """Combine outputs held at this moment. Not reset."""

    live_bytes: int = 0
    """Bytes of those. Not reset."""

    pinned: int = 0
    """Other values kept since the last reset, such as routing."""

    pinned_bytes: int = 0
    """Bytes of those that are tensors."""

    live_pinned: int = 0
    """Other values held at this moment. Not reset."""

    live_pinned_bytes: int = 0
    """Bytes of those that are tensors. Not reset."""


_LIVE = ("live_entries", "live_bytes", "live_pinned", "live_pinned_bytes")
_WHY = (
    "the recompute ended before the combine (PyTorch's early stop: nothing after it needs its output), or no backward "
    "came; mode 'none' does the same without the memory"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats(Counts):
    """A snapshot of the counters; see `stats`. `str` gives a table."""

    layers: Mapping[str, Counts] = dataclasses.field(default_factory=dict, compare=False)
    """The same counters by layer, under the name that errors call it by."""

    @property
    def only_memory(self) -> tuple[str, ...]:
        """Layers whose kept outputs were all freed without one being served: there the cache only costs memory."""
        return tuple(name for name, layer in self.layers.items() if layer.unserved and not layer.served)

    def __str__(self) -> str:
        # Only layers of which an output was kept: routers have pins alone, which are told below.
        rows = {name: row for name, row in self.layers.items() if row.stored or row.live_entries or row.served}
        rows["total"] = self
        names = max(len(name) for name in ("layer", *rows))
        lines = [f"{'layer':{names}}  stored  served  KiB kept  collectives  GEMMs skipped  live"]
        lines += [
            f"{name:{names}}  {row.stored:6}  {row.served:6}  {row.stored_bytes / 1024:8.1f}  "
            f"{row.collectives_skipped:11}  {row.gemms_skipped:13}  {row.live_entries:4}"
            for name, row in rows.items()
        ]
        if self.pinned_bytes:
            lines.append(f"routing kept: {self.pinned_bytes / 1024:.1f} KiB")
        if self.only_memory:
            lines.append(f"only memory, nothing served: {', '.join(self.only_memory)}: {_WHY}")
        return "\n".join(lines)


class Ledger:
    """What became of one kept value; outlives it until it is counted out."""

    __slots__ = ("epoch", "layer", "nbytes", "pinned", "served")

    def __init__(self, layer: str, nbytes: int, pinned: bool, epoch: int) -> None:
        self.layer, self.nbytes, self.pinned, self.epoch, self.served = layer, nbytes, pinned, epoch, False


class _Recorder:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[str, Counter[str]] = defaultdict(Counter)
        self._epoch = 0  # resets so far: what was stored before one is not counted as unserved after it
        # Entries that died and are not yet counted out. Entries die wherever their last reference goes, maybe in a
        # garbage collection inside a section locked below: a finalizer may append here, but not take the lock.
        self._died: deque[Ledger] = deque()

    def kept(self, entry: object, layer: str, nbytes: int, *, pinned: bool = False) -> Ledger:
        """Counts `entry`, which holds `nbytes`, as stored, and as live until nothing refers to it."""
        ledger = Ledger(layer, nbytes, pinned, self._epoch)
        count = (
            {"pinned": 1, "pinned_bytes": nbytes, "live_pinned": 1, "live_pinned_bytes": nbytes}
            if pinned
            else {"stored": 1, "stored_bytes": nbytes, "live_entries": 1, "live_bytes": nbytes}
        )
        with self._lock:
            self._layers[layer].update(count)
            self._count_out()
        weakref.finalize(entry, self._died.append, ledger).atexit = False
        return ledger

    def served(self, ledger: Ledger, collectives: int, gemms: int = 0) -> None:
        ledger.served = True
        with self._lock:
            self._layers[ledger.layer].update(served=1, collectives_skipped=collectives, gemms_skipped=gemms)

    def snapshot(self) -> Stats:
        with self._lock:
            self._count_out()
            total = Counter[str]()
            for count in self._layers.values():
                total.update(count)
            layers = {name: Counts(**count) for name, count in self._layers.items() if any(count.values())}
        return Stats(**total, layers=layers)

    def reset(self) -> None:
        with self._lock:
            self._count_out()
            live = {
                name: Counter({field: count[field] for field in _LIVE})
                for name, count in self._layers.items()
                if count["live_entries"] or count["live_pinned"]
            }
            self._layers.clear()
            self._layers.update(live)
            self._epoch += 1

    def _count_out(self) -> None:
        while self._died:
            ledger = self._died.popleft()
            count = self._layers[ledger.layer]
            if ledger.pinned:
                count.update(live_pinned=-1, live_pinned_bytes=-ledger.nbytes)
            else:
                count.update(live_entries=-1, live_bytes=-ledger.nbytes)
                if not ledger.served and ledger.epoch == self._epoch:
                    count["unserved"] += 1


recorder = _Recorder()


def stats() -> Stats:
    """What the recompute cache did in this process since `reset_stats`, and what it holds now.

    `stats().layers[name]` has the same counters for one layer. `stats().only_memory` names the layers whose kept
    outputs were freed without being served, where the cache only costs memory: PyTorch's early stop ended each
    recompute before it reached the combine. See "When it pays" in the README.
    """
    return recorder.snapshot()


def reset_stats() -> None:
    """Sets the counters to zero. Those that begin with `live` describe memory in use and stay."""
    recorder.reset()
