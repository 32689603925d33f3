"""The memory of a step over time, from every allocation and release that torch's profiler records."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

_CPU, _CUDA = 0, 1
"""`c10::DeviceType`, as traces have it."""


@dataclass(frozen=True)
class Timeline:
    """seconds: of each allocation or release, from the start. alive: bytes after it, `before` included. before: bytes
    alive at the start."""

    seconds: tuple[float, ...]
    alive: tuple[int, ...]
    before: int

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(self.alive, default=self.before)

    def thinned(self, most: int) -> list[tuple[float, int]]:
        """At most `2 * most` of the points: of each of `most` equal stretches of time, the lowest and the highest."""
        if not self.seconds:
            return [(0.0, self.before)]
        length = max(self.seconds[-1], 1e-9)
        extremes: dict[int, list[tuple[float, int]]] = {}
        for point in zip(self.seconds, self.alive, strict=True):
            several = extremes.setdefault(min(most - 1, int(point[0] / length * most)), [point, point])
            several[0] = min(several[0], point, key=lambda p: p[1])
            several[1] = max(several[1], point, key=lambda p: p[1])
        return [(0.0, self.before), *(point for several in extremes.values() for point in sorted(set(several)))]


def record_memory(step: Callable[[], object], device: torch.device, before: int) -> Timeline:
    """Run `step` and write down what is alive on `device` at any time.

    The profiler sees what torch's allocators hand out: tensors, and what kernels take for themselves.

    before: bytes alive now. What of them the step releases is not seen, so it has to leave them be.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    profiler = profile(activities=activities, profile_memory=True)
    with _nothing_on_stderr():
        profiler.start()
    try:
        step()
    finally:
        with _nothing_on_stderr():
            profiler.stop()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))  # the public way to what happened when: `events()` has sums alone
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    wanted = _CUDA if cuda else _CPU
    changes = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == wanted
    )
    alive, points = before, []
    for _, change in changes:
        alive += change
        points.append(alive)
    start = changes[0][0] if changes else 0.0
    return Timeline(tuple((when - start) / 1e6 for when, _ in changes), tuple(points), before)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of `tensors`, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@contextmanager
def _nothing_on_stderr() -> Iterator[None]:
    # torch's profiler library says there when it starts and stops, at any log level (docs/facts.md).
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
