"""One rank of a run tells all others that it has failed, whatever they wait for."""

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from ac_recipes.training.ranks import Ranks

_OFF, _FAILED, _LOST = 0, 1, 2
_NO_LIMIT = timedelta(days=365)


class Alarm:
    """Calls `failed`, in a thread of this rank, when another of `ranks` rings because it has failed, and `lost` when it
    rings because a third one is gone. To be made by all ranks alike.

    The thread waits for a message in a process group of its own (gloo), which costs a run nothing. What it calls is to
    use neither the process groups of the run nor what the main thread changes.
    """

    def __init__(self, ranks: Ranks, *, failed: Callable[[], None], lost: Callable[[], None]) -> None:
        self._ranks = ranks
        self._calls = {_FAILED: failed, _LOST: lost}
        self._group = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
        self._sent: list[dist.Work | None] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def ring(self, *, lost: bool) -> None:
        """Tell the others; `lost`: that one is gone. Returns at once: whom it tells may not listen any more."""
        for rank in range(self._ranks.world_size):
            if rank != self._ranks.rank:
                with suppress(RuntimeError):
                    self._send(_LOST if lost else _FAILED, rank)

    def switch_off(self) -> None:
        """End the thread of every rank. To be called by all ranks alike."""
        self._send(_OFF, (self._ranks.rank + 1) % self._ranks.world_size)
        self._thread.join()

    def _send(self, what: int, to: int) -> None:
        self._sent.append(dist.isend(torch.tensor([what]), to, group=self._group))

    def _listen(self) -> None:
        message = torch.empty(1, dtype=torch.int64)
        try:
            dist.recv(message, group=self._group)
        except RuntimeError:  # another rank has ended without a word: the main thread finds out by itself
            return
        if message.item() != _OFF:
            self._calls[int(message.item())]()
