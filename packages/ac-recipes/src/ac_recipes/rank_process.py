"""This process as one rank of a run: whose it is, how it tells what went wrong, how it ends."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ac_recipes.errors import LostPeerError, RankError, UsageError

PARENT = "AC_RECIPES_LAUNCHER"
"""Environment variable with the process id of the launcher of ours that started a rank."""

KEPT_FILE = "AC_RECIPES_KEPT_FILE"
"""Environment variable with the name of a file in which a rank that lost another leaves what the run goes on from.

The launcher is told the errors of those ranks only that failed by themselves, and one that was killed leaves none.
"""

RUN_FILE = "AC_RECIPES_RUN_FILE"
"""Environment variable with the name of a file in which the ranks leave the name of the run's folder."""

_LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def check_environment() -> None:
    """Refuse an environment that says half of what a launcher says, or what none says.

    Raises:
        UsageError: naming what is set, and what is missing or wrong.
    """
    found = _LAUNCHED & os.environ.keys()
    if found & {"RANK", "WORLD_SIZE"} and not is_worker():
        raise UsageError(
            f"the environment has {', '.join(sorted(found))} but not {', '.join(sorted(_LAUNCHED - found))}, so this "
            "is no rank of a launcher such as torchrun; unset them"
        )
    if not is_worker():
        return
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise UsageError(f"the environment has {name} {os.environ[name]!r}, which is no number; set or unset it")
    if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        raise UsageError(
            f"the environment has RANK {os.environ['RANK']}, which is none of WORLD_SIZE {os.environ['WORLD_SIZE']} "
            "ranks, 0 first; set or unset them"
        )


def is_worker() -> bool:
    """Whether a launcher, ours or torchrun, has started this process as one rank of a run."""
    return os.environ.keys() >= _LAUNCHED


def speaks_for_all() -> bool:
    """Whether this process prints what is to be printed once: it is no rank, or rank 0."""
    return not is_worker() or os.environ["RANK"] == "0"


def started_by_us() -> bool:
    """Whether this process is a rank that `launch.launch_ranks` has started."""
    return PARENT in os.environ and is_worker()


def told_as(error: BaseException) -> str | None:
    """`error` as this process is to tell it. None: to say nothing, as another rank of torchrun tells it.

    What all ranks find, such as a recipe that does not fit, rank 0 tells; what befalls one rank, that rank tells.
    """
    if not is_worker():
        return str(error)
    if isinstance(error, RankError) and (error.has_saved if isinstance(error, LostPeerError) else True):
        return f"rank {os.environ['RANK']}: {error}"
    return str(error) if speaks_for_all() else None


def report_failure(error: BaseException) -> bool:
    """In a rank that our launcher started: leave `error` to the launcher, which shows it once.

    Returns:
        Whether that was done; if not, the caller shows the error itself.
    """
    if not started_by_us():
        return False
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        if isinstance(error, LostPeerError):
            Path(os.environ[KEPT_FILE]).write_text(error.kept, encoding="utf-8")
        get_error_handler().record_exception(error)
    except OSError:  # the disk may be full here too, and half of what was to be left cannot be read
        for name in (KEPT_FILE, "TORCHELASTIC_ERROR_FILE"):
            Path(os.environ[name]).unlink(missing_ok=True)
        return False
    return True


def leave_run(folder: Path) -> None:
    """In a rank that our launcher started: tell it the folder of the run."""
    if started_by_us() and os.environ.get("LOCAL_RANK") == "0":
        with suppress(OSError):  # it is for the last words alone
            Path(os.environ[RUN_FILE]).write_text(str(folder), encoding="utf-8")


def end_rank(code: int) -> NoReturn:
    """End this rank with exit code `code`, here and now.

    Not through the interpreter's finalisation: there gloo aborts one process in ten ("terminate called without an
    active exception") or hangs (docs/facts.md), and a run that is done would be reported as failed, or never end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_launcher() -> None:
    """In a rank that our launcher started: end when the launcher ends.

    A launcher that is killed cannot end its ranks, and they would hold their memory and their port until a collective
    times out. A Ctrl-C reaches the ranks as well: they end by it at once and leave the word to the launcher.
    """
    if not started_by_us():
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = int(os.environ[PARENT])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
