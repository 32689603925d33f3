"""Starts the ranks, waits for them, and never leaves one behind."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.bench_moe.rank import SETTINGS, result_file
from tools.bench_moe.records import Report
from tools.bench_moe.settings import Settings

_ROOT = Path(__file__).parents[2]
_GRACE = 3.0  # seconds for the other ranks after one has failed: most then wait for it in a collective


class RanksError(RuntimeError):
    """A rank failed, or hung. What it printed, or where it was, is on standard error."""


def run(settings: Settings, timeout: float) -> list[Report]:
    """Runs `settings` on its ranks; the report of each.

    Raises:
        RanksError: a rank failed, or not all were done after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="bench_moe-") as name:
        folder = Path(name)
        (folder / SETTINGS).write_bytes(pickle.dumps((settings, timeout)))
        command = [sys.executable, "-m", "tools.bench_moe.rank", str(folder)]
        supervise([[*command, str(rank)] for rank in range(settings.ranks)], timeout)
        return [pickle.loads(result_file(folder, rank).read_bytes()) for rank in range(settings.ranks)]


def supervise(commands: Sequence[Sequence[str]], timeout: float) -> None:
    """Runs one process for each command until all are done. Their output goes to standard error.

    Raises:
        RanksError: one ended with another status than 0, or not all were done after `timeout` seconds. By then all are
            dead; one that hung is asked for its stacks first (SIGUSR1, for `faulthandler`).
    """
    # Above any level that torch's profiler logs at: each start and stop of it is no progress.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            # A pipe that closes when this process ends, however it ends.
            process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=2)
            processes.append(process)
        _wait(processes, timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    failed: dict[int, int] = {}
    while (running := [rank for rank, process in enumerate(processes) if process.poll() is None]) and (
        time.monotonic() < deadline
    ):
        if not failed and (failed := _failures(processes)):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.05)
    failed = failed or _failures(processes)
    if failed:
        told = ", ".join(f"rank {rank} ended with status {status}" for rank, status in failed.items())
        raise RanksError(f"{told}; its message is above")
    if running:
        for rank in running:
            processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # for faulthandler to write
        raise RanksError(
            f"ranks {', '.join(map(str, running))} were not done after {timeout:g} seconds; where they were is above. "
            "Give --timeout more, or a smaller shape"
        )


def _failures(processes: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    return {rank: process.returncode for rank, process in enumerate(processes) if process.returncode}
