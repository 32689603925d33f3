"""Memory in bytes: the peak of this process since the last reading, and how much it may have."""

import os
import resource
from pathlib import Path

import torch


class PeakMemory:
    """`read()` returns the peak since the last `read()`.

    CUDA: bytes of live tensors, `torch.cuda.max_memory_allocated`. CPU: resident memory of the whole process, the
    interpreter and the libraries included; torch's CPU allocator keeps no peak of its own. `source` says which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._status = Path("/proc/self/status")
        self._resettable = device.type != "cuda" and self._reset()
        if device.type == "cuda":
            self.source = "peak allocated on the GPU"
        elif self._resettable:
            self.source = "peak resident memory of the process, per interval"
        else:
            self.source = "peak resident memory of the process since its start"

    def read(self) -> int:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak
        peak = self._high_water_mark()
        if self._resettable:
            self._reset()
        return peak

    @staticmethod
    def _reset() -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM, proc(5)
        except OSError:
            return False
        return True

    def _high_water_mark(self) -> int:
        if self._resettable:
            line = next(line for line in self._status.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def memory_limit(device: torch.device) -> int:
    """What a process may allocate on `device`: all of a GPU, or the least of the machine's memory, the control group's
    and the process's own limit."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    for group in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # version 2, version 1
        try:
            limits.append(int(Path(group).read_text()))
        except (OSError, ValueError):  # no such version here, or the word "max"
            continue
    return min(limits)
