"""Runs a function of a test file on several ranks at once.

    def on_each_rank(rank: int, width: int) -> float: ...
    assert ranks.run(on_each_rank, width=3) == [1.0, 2.0]      # one result a rank, in order

The processes are started once: to load torch and make a group takes seconds. Where one fails or none comes back in
time, all are killed, and the next test starts new ones.
"""

import datetime
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_GRACE = 3.0  # seconds for the other ranks once one has failed: they wait for it in a collective


class Ranks:
    """`size` processes that write what they print into `folder`."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._folder = folder
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._starts = 0

    def run(self, function: Callable[..., Any], *, timeout: float = 120.0, **arguments: Any) -> list[Any]:
        """The results of `function(rank, **arguments)` on every rank.

        `function` is found again by its file and name, so it stands at the top of its file. Arguments and results are
        pickled.

        Raises:
            AssertionError: it raised on a rank, or some rank was not done after `timeout` seconds.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__name__, arguments, timeout))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout + _GRACE  # at the timeout, a rank writes where it is and ends
        while len(results) + len(failures) < self.size and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([p for rank, p in enumerate(self._pipes) if rank not in results | failures], left):
                rank = self._pipes.index(pipe)
                try:
                    result, failure = pipe.recv()
                except EOFError:
                    result, failure = None, "its process ended"
                if failure:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + _GRACE)
                else:
                    results[rank] = result
        hung = {rank: "not done in time" for rank in range(self.size) if rank not in results | failures}
        if failures or hung:
            self._kill()
            told = [f"rank {rank}: {what}\n{self._log(rank)}" for rank, what in (failures | hung).items()]
            raise AssertionError(f"{function.__name__} failed\n" + "\n".join(told))
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Let the processes end, and kill those that do not."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(2 * _GRACE)
        self._kill()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._starts += 1
        store = str(self._folder / f"store{self._starts}")
        for rank in range(self.size):
            pipe, end = spawn.Pipe()
            log = str(self._log_file(rank))
            process = spawn.Process(target=_serve, args=(end, rank, self.size, store, log), daemon=True)
            process.start()
            end.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _log_file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.{self._starts}.log"

    def _log(self, rank: int) -> str:
        return self._log_file(rank).read_text(errors="replace")[-6000:]


def _serve(pipe: Connection, rank: int, size: int, store: str, log: str) -> None:
    """The life of a rank: do what comes through the pipe, until told to end."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    wait_at_most = datetime.timedelta(seconds=300)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait_at_most
    )
    files: dict[str, Any] = {}
    while (job := _received(pipe)) is not None:
        path, name, arguments, timeout = job
        faulthandler.dump_traceback_later(timeout, exit=True, file=sys.__stderr__)
        try:
            if path not in files:
                spec = importlib.util.spec_from_file_location(Path(path).stem, path)
                files[path] = importlib.util.module_from_spec(spec)
                sys.modules[Path(path).stem] = files[path]
                spec.loader.exec_module(files[path])
                gc.freeze()  # tests collect often
            pipe.send((getattr(files[path], name)(rank, **arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    distributed.barrier()
    os._exit(0)  # past the destructor of the gloo group, which can wait for ever


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the tests were killed
        os._exit(1)
