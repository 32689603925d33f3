"""A warm pool of rank processes for the tests of sharded heads.

    def on_each_rank(rank: int, size: int) -> float: ...      # at the top of a test file
    assert ranks.run(on_each_rank, size=3) == [1.0, 2.0]      # one result a rank

A rank that raises, dies or hangs ends them all and fails the test; the next test gets new ones.
"""

import datetime
import faulthandler
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START = 120.0  # seconds for importing torch and meeting the others, on a machine that is busy
PATIENCE = 5.0  # seconds for the other ranks once one has failed: most wait for it in a collective


class RanksError(AssertionError):
    """What each failed rank said."""


class Ranks:
    def __init__(self, size: int) -> None:
        self._size = size
        self._pool: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], *, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """Results of ``function(rank, **arguments)`` in order of rank; arguments and results are pickled."""
        if not self._pool:
            self._start()
        for _, pipe in self._pool:
            pipe.send((function.__code__.co_filename, function.__name__, arguments, timeout))
        # A hung rank writes its stack and ends by itself after `timeout`; the parent only has to outlast that.
        deadline, answers = time.monotonic() + timeout + PATIENCE, {}
        while len(answers) < self._size and (left := deadline - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._pool) if rank not in answers}
            for pipe in wait(list(waiting), left):
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except EOFError:
                    answers[waiting[pipe]] = (False, "the process ended: see its stack in the captured output")
                if not answers[waiting[pipe]][0]:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
        failed = [f"rank {rank}: {what}" for rank, (fine, what) in sorted(answers.items()) if not fine]
        failed += [f"rank {rank}: no answer" for rank in range(self._size) if rank not in answers]
        if failed:
            self.close()
            raise RanksError(f"{function.__name__}\n" + "\n".join(failed))
        return [answers[rank][1] for rank in range(self._size)]

    def close(self) -> None:
        if not self._pool:
            return
        for process, pipe in self._pool:
            pipe.close()
            process.join(1.0)
            process.kill()
            process.join()
        self._pool = []
        self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ac-loss-ranks-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, store, rank, self._size), daemon=True)
            process.start()
            theirs.close()  # or the end of the process would not end the pipe
            self._pool.append((process, ours))
        for rank, (_, pipe) in enumerate(self._pool):
            if not pipe.poll(START):
                self.close()
                raise RanksError(f"rank {rank} did not start within {START} s")
            pipe.recv()


def _serve(pipe: Connection, store: str, rank: int, size: int) -> None:
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120)
    )
    pipe.send("ready")
    files: dict[str, Any] = {}
    while True:
        try:
            path, name, arguments, timeout = pipe.recv()
        except EOFError:
            os._exit(0)  # not by way of gloo's destructors, which wait for the other ranks
        faulthandler.dump_traceback_later(timeout, exit=True)
        try:
            if path not in files:
                spec = importlib.util.spec_from_file_location(Path(path).stem, path)
                files[path] = sys.modules[Path(path).stem] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(files[path])
            answer = (True, getattr(files[path], name)(rank, **arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
