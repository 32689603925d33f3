"""This process among its peers: rank, device, process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ac_recipes.errors import RankError
from ac_recipes.rank_process import is_worker

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. `world_size` 1 means: alone, without a process group.

    group: of the ranks that are counted; None: all of the run.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """The sum of `value` over all ranks, in float64."""
        if self.world_size == 1:
            return float(value)
        total = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        return total.item()

    def max(self, value: float) -> float:
        """The largest `value` of all ranks, in float64."""
        if self.world_size == 1:
            return float(value)
        largest = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.item()

    def from_first(self, value: T) -> T:
        """The `value` that rank 0 has."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, device=self.device, group_src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world_size > 1:
            dist.barrier(group=self.group)


def local_device() -> torch.device:
    """The GPU that belongs to this process, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def ranks_here() -> Ranks:
    """This process among the ranks of the process group; where a launcher announces one, it is made.

    Raises:
        RankError: the others cannot be met.
    """
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if not is_worker() or os.environ["WORLD_SIZE"] == "1":
            return Ranks(0, 1, device)
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except RuntimeError as error:  # gloo's are no narrower
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise RankError(
                f"cannot meet the other ranks at {where}: {str(error).partition(chr(10))[0]}; another rank has ended "
                "and says why, or MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE do not fit"
            ) from error
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the process group that torch's launcher announces in the environment, for the time of the context."""
    ranks = ranks_here()
    yield ranks
    if ranks.world_size == 1:
        return
    # Not in a `finally`: after an error the peers may wait in a collective, and a barrier would wait with them.
    dist.barrier()
    if ranks.device.type == "cuda":
        dist.destroy_process_group()
    # gloo's group is left to the end of the process. Its destructor, run by Python, may wait for a thread that waits
    # for Python (docs/facts.md).
