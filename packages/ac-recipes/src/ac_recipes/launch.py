"""Starting the ranks of a run on this machine through torch's own launcher (torch.distributed.elastic)."""

import logging
import os
import signal
import sys
import threading
import time
import uuid
from typing import Any, NoReturn

from ac_recipes.errors import RunError, RunInterruptedError, UsageError

_PARENT = "AC_RECIPES_LAUNCHER"
_LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def check_environment() -> None:
    """Refuse an environment that says half of what a launcher says.

    Raises:
        UsageError: naming what is set and what is missing.
    """
    found = _LAUNCHED & os.environ.keys()
    if found & {"RANK", "WORLD_SIZE"} and not is_worker():
        raise UsageError(
            f"the environment has {', '.join(sorted(found))} but not {', '.join(sorted(_LAUNCHED - found))}, so this "
            "is no rank of a launcher such as torchrun; unset them"
        )


def is_worker() -> bool:
    """Whether a launcher, ours or torchrun, has started this process as one rank of a run."""
    return os.environ.keys() >= _LAUNCHED


def speaks_for_all() -> bool:
    """Whether this process prints what is to be printed once: it is no rank, or rank 0."""
    return not is_worker() or os.environ["RANK"] == "0"


def started_by_us() -> bool:
    """Whether this process is a rank that `launch_ranks` has started."""
    return _PARENT in os.environ and is_worker()


def launch_ranks(arguments: list[str], nproc_per_node: int) -> None:
    """Run `ac-recipes ARGUMENTS` in `nproc_per_node` processes; returns when all have ended well.

    On a machine with GPUs each rank gets one. On the CPU the ranks share the cores.

    Raises:
        UsageError: more ranks than GPUs, or a rank found that the run does not fit.
        RunInterruptedError: a signal ended the run.
        RunError: a rank failed; the others were ended. The message is that of the first one that failed.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    gpus = torch.cuda.device_count()
    if gpus and nproc_per_node > gpus:
        raise UsageError(f"--nproc-per-node: {nproc_per_node} ranks asked for, but this machine has {gpus} GPUs")
    # Each rank would otherwise start a thread for every core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc_per_node)))
    os.environ[_PARENT] = str(os.getpid())
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # it reports a failed rank at length; we do so in a line
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc_per_node,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "ac_recipes", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == UsageError.exit_code:
            raise UsageError(_message(failure)) from error
        raise RunError(f"rank {rank}: {_message(failure)}; the other ranks were ended") from error
    except SignalException as error:
        raise RunInterruptedError(error.sigval) from error


def report_failure(error: BaseException) -> bool:
    """In a rank that our launcher started: leave `error` to the launcher, which shows it once.

    Returns:
        Whether there is such a launcher; if not, the caller shows the error itself.
    """
    if not started_by_us():
        return False
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    return True


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
    parent = int(os.environ[_PARENT])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _message(failure: Any) -> str:
    """The text that the failed rank left, or how it ended when it left none."""
    left = failure.error_file_data.get("message")
    if isinstance(left, dict):
        return str(left["message"]).partition(": ")[2] or str(left["message"])
    if failure.exitcode < 0:
        return f"ended by {failure.signal_name()}"
    return f"ended with exit code {failure.exitcode}"
