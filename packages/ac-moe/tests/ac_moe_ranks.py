"""Runs a function of a test file on several ranks at once, and says where they are when they do not come back.

    def on_each_rank(rank: int, size: int) -> float: ...
    assert ranks.run(on_each_rank, size=3) == [1.0, 2.0]      # one result per rank

The processes live on between tests (starting torch and a group takes seconds). A test that fails on one rank, or that
takes longer than its timeout, kills them all; the next test gets new ones. Run as a script, this file is one rank.
"""

import contextlib
import datetime
import faulthandler
import gc
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

GRACE = 3.0  # seconds for the other ranks after one has failed: most then wait for it in a collective


class RanksError(AssertionError):
    """A function failed or hung on some rank; the message holds each rank's traceback or stack."""


class Ranks:
    """A pool of rank processes; `size` of them, with their files in `folder`."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._folder = folder
        self._generation = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """Calls `function(rank, **arguments)` on every rank and returns the results in order of rank.

        `function` is found again by its file and name, so it must stand at the top of the file. Arguments and results
        are pickled.

        Raises:
            RanksError: it raised on a rank, or not all ranks were done after `timeout` seconds.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((function.__code__.co_filename, function.__name__, arguments))
        for connection in self._connections:
            connection.send_bytes(job)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            waiting = {self._connections[rank]: rank for rank in range(self.size) if rank not in answers}
            for connection in wait(list(waiting), left):
                rank = waiting[connection]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = (False, f"the process ended\n{self._log(rank)}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if len(answers) < self.size or not all(fine for fine, _ in answers.values()):
            raise RanksError(self._autopsy(function.__name__, timeout, answers))
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            process.kill()
            process.wait()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        self._generation += 1
        address = str(self._folder / f"socket{self._generation}")
        store = str(self._folder / f"store{self._generation}")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with Listener(address, "AF_UNIX") as listener:
            for rank in range(self.size):
                command = [sys.executable, __file__, address, store, str(rank), str(self.size)]
                with self._log_file(rank).open("wb") as log:
                    self._processes.append(
                        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
                    )
            # `accept` has no timeout; a rank that dies at start must not make it wait for ever.
            listener._listener._socket.settimeout(60)
            connections: dict[int, Connection] = {}
            for _ in range(self.size):
                connection = listener.accept()
                connections[connection.recv()] = connection
        self._connections = [connections[rank] for rank in range(self.size)]

    def _autopsy(self, name: str, timeout: float, answers: dict[int, tuple[bool, Any]]) -> str:
        hung = [rank for rank in range(self.size) if rank not in answers]
        for rank in hung:
            self._processes[rank].send_signal(signal.SIGUSR1)
        if hung:
            time.sleep(0.5)  # for faulthandler to write
        told = [f"{name} failed on rank {rank}:\n{text}" for rank, (fine, text) in answers.items() if not fine]
        told += [f"{name} hung on rank {rank} (timeout {timeout} s), here:\n{self._log(rank)}" for rank in hung]
        for process in self._processes:
            process.kill()
        self.close()
        return "\n\n".join(told)

    def _log_file(self, rank: int) -> Path:
        return self._folder / f"log{self._generation}.rank{rank}"

    def _log(self, rank: int) -> str:
        return self._log_file(rank).read_text(errors="replace")[-6000:]


def serve(address: str, store: str, rank: int, size: int) -> None:
    """The life of one rank: join the group, then run what is asked until the parent goes away."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Client(address, "AF_UNIX")
    connection.send(rank)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120)
    )
    modules: dict[str, Any] = {}
    while True:
        try:
            file, name, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)  # not through gloo's destructors, which wait for the other ranks
        try:
            if file not in modules:
                spec = importlib.util.spec_from_file_location(Path(file).stem, file)
                modules[file] = importlib.util.module_from_spec(spec)
                sys.modules[Path(file).stem] = modules[file]  # for what the test pickles
                spec.loader.exec_module(modules[file])
            # Nodes of an earlier job's backward that failed stay in the thread's queue until another one runs.
            torch.zeros((), requires_grad=True).backward()
            gc.collect()
            gc.freeze()  # what is left are modules, 300 000 objects: later collections pass them by
            answer = (True, getattr(modules[file], name)(rank, **arguments))
            answer = pickle.dumps(answer)
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
