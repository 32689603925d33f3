"""Running many checks in processes of their own, so that one that dies or hangs costs one class."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

Record = dict[str, object]
"""A `check.Result` as plain data."""


def run(
    classes: Iterable[tuple[str, str]],
    command: Sequence[str],
    *,
    jobs: int,
    limit: float,
    done: Callable[[Record], None],
) -> None:
    """Check every class and call `done` with each record as it comes, from one thread at a time.

    Args:
        classes: names and kinds.
        command: starts a worker: it reads `kind name` lines and answers each with a line of JSON.
        jobs: workers at the same time.
        limit: seconds for one class, after which its worker is killed.
    """
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for item in classes:
        waiting.put(item)
    lock = threading.Lock()
    errors: list[Exception] = []

    def serve() -> None:
        worker = _Worker(command, limit)
        try:
            while not errors:
                name, kind = waiting.get_nowait()
                record = worker.check(name, kind)
                with lock:
                    done(record)
        except queue.Empty:
            pass
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            errors.append(error)
        finally:
            worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class _Worker:
    """A process that checks one class after the other; started when first needed, and again after it died."""

    def __init__(self, command: Sequence[str], limit: float) -> None:
        self._command = command
        self._limit = limit
        self._process: subprocess.Popen[str] | None = None

    def check(self, name: str, kind: str) -> Record:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            process.kill()

        timer = threading.Timer(self._limit, end)
        timer.start()
        try:
            process.stdin.write(f"{kind} {name}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
        self.stop()
        if timed_out.is_set():
            return {"name": name, "kind": kind, "outcome": "too slow", "reason": f"more than {self._limit:g} s"}
        return {"name": name, "kind": kind, "outcome": "crashed", "reason": _cause(process.returncode)}

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def worker_command(policy: str, dropout: float) -> list[str]:
    return [sys.executable, "-m", "tools.sweep.worker", policy, str(dropout)]


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
