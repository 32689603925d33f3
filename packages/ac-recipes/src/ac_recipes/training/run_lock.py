"""One run in a folder at a time: a second one would delete what the first is writing.

The lock is the kernel's: it goes with the process that holds it, however that ends, and leaves nothing to clean up.
Across machines it holds on file systems whose locks do (NFS since Linux 2.6.12, unless mounted with `nolock` or
`local_lock`; Lustre with `flock`); where a file system has none, the run says so and goes on.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ac_recipes.errors import UsageError
from ac_recipes.training.console import RunConsole
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder

_TAKEN = (errno.EAGAIN, errno.EACCES)


@contextmanager
def alone_in(run: RunFolder, ranks: Ranks, console: RunConsole) -> Iterator[None]:
    """No other run has the folder, for the time of the context. Entered by all ranks alike; rank 0 holds the lock.

    Raises:
        UsageError: another run has it. Nothing in the folder was changed.
    """
    file = held_by = None
    if ranks.is_first:
        try:
            file, held_by = _lock(run.lock)
        except OSError as error:
            console.line(
                f"{run.lock} cannot be locked ({error.strerror or error}): see to it that no other run goes on in this "
                "folder meanwhile"
            )
    if (held_by := ranks.from_first(held_by)) is not None:
        raise UsageError(
            f"--resume: {run.path} is in use: {held_by} trains in it. Wait until that has ended, or stop it (SIGTERM "
            "saves first); nothing was changed"
        )
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _lock(path: Path) -> tuple[IO[str] | None, str | None]:
    """The locked file, or who holds the lock."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with file:
            if error.errno not in _TAKEN:
                raise
            file.seek(0)
            return None, file.read().strip() or "another process"
    with suppress(OSError):  # it is for the message alone
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    return file, None
