"""Starting the ranks of a run through torch's own launcher (torch.distributed.elastic), on this node or on several."""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from ac_recipes.errors import LostPeerError, RunError, RunInterruptedError, UsageError
from ac_recipes.invocation import Invocation
from ac_recipes.meeting import checked_port, host_and_port, reach
from ac_recipes.rank_process import KEPT_FILE, PARENT, RUN_FILE

STOP_FILE = "AC_RECIPES_STOP_FILE"
"""Environment variable with the name of a file in which the launcher leaves the number of a signal that it was sent.

It does not pass the signal itself on: a terminal or Slurm may have sent it to the ranks too, and a second Ctrl-C kills.
"""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How the launchers of several nodes find one another. Names are torchrun's.

    rdzv_backend `c10d`: at `rdzv_endpoint`, HOST:PORT of one of the nodes, under the name `rdzv_id`; ranks are numbered
    as the nodes arrive. `static`: at `master_addr`:`master_port`, ranks are numbered by `node_rank`.

    Raises:
        UsageError: something is missing, or would be ignored.
    """

    nnodes: int | None = None
    node_rank: int | None = None
    rdzv_backend: Literal["c10d", "static"] = "c10d"
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        static = {name: getattr(self, name) for name in ("master_addr", "master_port", "node_rank")}
        c10d = {name: getattr(self, name) for name in ("rdzv_endpoint", "rdzv_id")}
        if self.nnodes is None:
            self._refuse(static | c10d, "is for several nodes; give --nnodes as well, or leave it out")
        elif self.nnodes < 1:
            raise UsageError(f"--nnodes: {self.nnodes} is below 1")
        elif self.rdzv_backend == "static":
            self._refuse(c10d, "is for --rdzv-backend c10d; with static, nodes meet at --master-addr:--master-port")
            self._require(static)
            checked_port("--master-port", static["master_port"])
            if not 0 <= static["node_rank"] < self.nnodes:
                raise UsageError(f"--node-rank: {self.node_rank} is not one of the {self.nnodes} nodes, 0 first")
        else:
            self._refuse(static, "is for --rdzv-backend static; with c10d, ranks are numbered as the nodes arrive")
            if self.nnodes > 1:
                self._require({"rdzv_endpoint": self.rdzv_endpoint})
            if self.rdzv_endpoint is not None:
                host_and_port("--rdzv-endpoint", self.rdzv_endpoint)

    @property
    def count(self) -> int:
        """How many there are."""
        return self.nnodes or 1

    @property
    def endpoint(self) -> str:
        """Where the launchers meet; a launcher alone, at a free port of its machine."""
        if self.rdzv_backend == "static" and self.nnodes is not None:
            return f"{self.master_addr}:{self.master_port}"
        return self.rdzv_endpoint or "localhost:0"

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around torch's launcher, which waits for the other nodes there.

        Raises:
            UsageError: the name of the node where they meet does not resolve.
            RunError: they do not meet.
        """
        if self.nnodes is None or self.nnodes == 1:
            yield
            return
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError

        flag = "--master-addr" if self.rdzv_backend == "static" else "--rdzv-endpoint"
        reach(flag, *host_and_port(flag, self.endpoint))
        try:
            yield
        except (RendezvousError, DistError) as error:
            failed = "cannot reach" if isinstance(error, (RendezvousConnectionError, DistError)) else "did not meet at"
            reason = str(error.__cause__ or error).splitlines()[0]
            raise RunError(f"{flag}: {failed} {self.endpoint}: {reason}") from error

    @staticmethod
    def _refuse(values: dict[str, Any], why: str) -> None:
        for name, value in values.items():
            if value is not None:
                raise UsageError(f"--{name.replace('_', '-')}: {value} {why}")

    def _require(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is None:
                raise UsageError(
                    f"--{name.replace('_', '-')}: missing; {self.nnodes} nodes with --rdzv-backend "
                    f"{self.rdzv_backend} need it to find one another"
                )


class _EndedEarlyError(BaseException):  # no Exception: torch would take it for a failed connection, or try again
    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class _Stop:
    """What the launcher does with SIGTERM and SIGINT.

    Before there are ranks, as while it waits for another node, either ends it. Then the first is left in `file` for the
    ranks, which save and end. Another SIGTERM says nothing new, up to the end of the process: all that the run came to
    is saved, or being saved. A second Ctrl-C ends the ranks.

    waits_in_torch: whether it waits for nodes in C++, where no handler in Python is called: there the system ends it.
    """

    def __init__(self, file: Path, *, waits_in_torch: bool) -> None:
        self.file = file
        self._waits_in_torch = waits_in_torch
        self._has_ranks = False
        self._is_told = False

    def __enter__(self) -> "_Stop":
        self._listen(signal.SIG_DFL if self._waits_in_torch else self._hear)
        return self

    def ranks_start(self) -> None:
        """From now on there is somebody to ask."""
        self._has_ranks = True
        self._listen(self._hear)

    @staticmethod
    def _listen(handler: Any) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, handler)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self._is_told else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if isinstance(error, _EndedEarlyError):
            raise RunInterruptedError(error.signum, "the ranks were not started yet") from error

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        signum = signal.Signals(number)
        if not self._has_ranks:
            raise _EndedEarlyError(signum)
        if not self._is_told:
            self._is_told = True
            self.file.write_text(str(number))
        elif signum == signal.SIGINT:
            raise SignalException(f"a second {signum.name}", signum)


@contextmanager
def _restored_environment() -> Iterator[None]:
    """What is set for the ranks is not there for whoever called the launcher from Python."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@_restored_environment()
def launch_ranks(arguments: list[str], nproc_per_node: int, nodes: Nodes, invocation: Invocation) -> None:
    """Run `ac-recipes ARGUMENTS` in `nproc_per_node` processes here; returns when all have ended well.

    On a machine with GPUs each rank gets one. On the CPU the ranks share the cores. SIGTERM or SIGINT asks the ranks to
    save and end well; a second SIGINT ends them.

    Raises:
        UsageError: more ranks than GPUs, a node's name that does not resolve, or a rank found that the run does not
            fit.
        RunInterruptedError: a signal ended the run before a rank could say more.
        RunError: the nodes do not meet; or a rank failed, and the others were ended: the message and the exit code are
            those of the first one that failed, also where a signal had asked it to end.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    gpus = torch.cuda.device_count()
    if gpus and nproc_per_node > gpus:
        raise UsageError(f"--nproc-per-node: {nproc_per_node} ranks asked for, but this machine has {gpus} GPUs")
    if not gpus:
        # gloo logs what it raises, and we tell that in a line. With GPUs it stays: NCCL's watchdog says more than it
        # raises.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # Each rank would otherwise start a thread for every core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc_per_node)))
    # A rank that waits in a collective for one that is gone does not hear the SIGTERM that is to end it. One that saves
    # what it was left with needs the time.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    os.environ[PARENT] = str(os.getpid())
    invocation.hand_on()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # it reports a failed rank at length; we do so in a line
    with (
        tempfile.TemporaryDirectory(prefix="ac-recipes-") as folder,
        _Stop(Path(folder) / "stop", waits_in_torch=nodes.node_rank == 0) as stop,
    ):
        stop_file = stop.file
        kept_file, run_file = Path(folder) / "kept", Path(folder) / "run"
        os.environ |= {STOP_FILE: str(stop_file), KEPT_FILE: str(kept_file), RUN_FILE: str(run_file)}

        class Logs(DefaultLogsSpecs):
            def reify(self, envs: dict[int, dict[str, str]]) -> Any:  # torch's launcher calls it as it starts ranks
                stop.ranks_start()
                return super().reify(envs)

        config = LaunchConfig(
            min_nodes=nodes.count,
            max_nodes=nodes.count,
            nproc_per_node=nproc_per_node,
            run_id=nodes.rdzv_id or (uuid.uuid4().hex if nodes.count == 1 else "ac-recipes"),
            rdzv_backend=nodes.rdzv_backend,
            rdzv_endpoint=nodes.endpoint,
            rdzv_configs={} if nodes.node_rank is None else {"rank": nodes.node_rank},
            max_restarts=0,
            monitor_interval=0.2,
            logs_specs=Logs(),
            signals_to_handle="SIGHUP,SIGQUIT",  # SIGTERM and SIGINT are ours
        )
        try:
            with nodes.meeting():
                elastic_launch(config, sys.executable)("-m", "ac_recipes", *arguments)
        except ChildFailedError as error:
            asked = int(stop_file.read_text()) if stop_file.exists() else None
            raise _told(error.failures, asked, lambda: _kept(kept_file, run_file, invocation)) from error
        except SignalException as error:
            raise RunInterruptedError(error.sigval, _kept(kept_file, run_file, invocation)) from error


def _told(failures: dict[int, Any], asked: int | None, kept: Callable[[], str]) -> UsageError | RunError:
    """What is to be said of the ranks that failed.

    Args:
        asked: the signal that asked the ranks to end, if there was one. It ends those that are still starting.
        kept: what the run goes on from.
    """
    rank, failure = _first_failure(failures)
    message = _left_by(failure)
    if message is None:
        if asked is not None and (failure.exitcode > 0 or failure.exitcode == -asked):
            return RunInterruptedError(asked, kept())
        return RunError(f"rank {rank}: {_ended(failure)}; the other ranks were ended; {kept()}")
    kind, _, text = message.partition(": ")
    if failure.exitcode == UsageError.exit_code:
        return UsageError(text)
    is_interrupted = kind == RunInterruptedError.__name__  # as all ranks are
    error = RunError(text if is_interrupted else f"rank {rank}: {text or kind}; the other ranks were ended")
    error.exit_code = failure.exitcode
    return error


def _kept(kept_file: Path, run_file: Path, invocation: Invocation) -> str:
    """What a run goes on from, as a rank has left it; or as it is found in the folder that the ranks have opened."""
    if kept_file.exists():
        return kept_file.read_text(encoding="utf-8")
    from ac_recipes.training.faults import kept_in
    from ac_recipes.training.run_folder import RunFolder

    run = RunFolder(Path(run_file.read_text(encoding="utf-8"))) if run_file.exists() else None
    return kept_in(run, invocation)


def _first_failure(failures: dict[int, Any]) -> tuple[int, Any]:
    """The rank that failed first, and how. Times are whole seconds, so that ranks which only lost that one may seem to
    be as early: what they say gives way to a signal and to any other error. One that says nothing gives way as well."""

    def order(rank: int) -> tuple[bool, int, bool]:
        message = _left_by(failures[rank])
        lost_a_peer = message is not None and message.startswith(LostPeerError.__name__)
        return lost_a_peer, failures[rank].timestamp, message is None

    rank = min(failures, key=order)
    return rank, failures[rank]


def _left_by(failure: Any) -> str | None:
    """The error that the failed rank left, its class first; None: it left none."""
    left = failure.error_file_data.get("message")
    return str(left["message"]) if isinstance(left, dict) else None


def _ended(failure: Any) -> str:
    """How a rank ended that left no error."""
    if failure.exitcode == -signal.SIGKILL:
        return "ended by SIGKILL, which is how Linux ends a process when the machine is out of memory"
    if failure.exitcode < 0:
        return f"ended by {failure.signal_name()}"
    return f"ended with exit code {failure.exitcode}"
