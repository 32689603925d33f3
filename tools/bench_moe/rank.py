"""One rank: `python -m tools.bench_moe.rank FOLDER RANK`. Started by `tools.bench_moe.launch`."""

import datetime
import faulthandler
import os
import pickle
import platform
import signal
import sys
import threading
from pathlib import Path

SETTINGS, STORE = "settings.pickle", "store"
"""Files in the folder: what to run, and where the ranks meet."""
ORPHANED = 3
"""Exit status of a rank whose parent is gone."""


def result_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its `Report`."""
    return folder / f"rank{rank}.pickle"


def main(folder: Path, rank: int) -> None:
    """Joins the group, measures every case, leaves the results."""
    import torch
    import torch.distributed as dist

    from tools.bench_moe.case import Case, measure
    from tools.bench_moe.records import Report

    settings, timeout = pickle.loads((folder / SETTINGS).read_bytes())
    torch.set_num_threads(1)
    gpu = settings.device == "cuda"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"file://{folder / STORE}",
        rank=rank,
        world_size=settings.ranks,
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device if gpu else None,
    )
    cases = []
    for dispatcher in settings.dispatchers:
        for form in settings.forms:

            def say(line: str, title: str = f"{dispatcher}, {form}") -> None:
                if rank == 0:
                    print(f"{title}: {line}", file=sys.stderr, flush=True)

            cases.append(measure(Case(settings, dispatcher, form, device), settings.rounds, say))
    name = torch.cuda.get_device_name(device) if gpu else f"{platform.machine()} CPU"
    result_file(folder, rank).write_bytes(pickle.dumps(Report(name, torch.__version__, cases)))
    dist.barrier()


def _end_with_the_parent() -> None:
    # The parent holds the other end of this pipe and never writes: reading returns when the parent is gone.
    sys.stdin.buffer.read()
    os._exit(ORPHANED)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # docs/facts.md: gloo may abort or hang when its group is destroyed
