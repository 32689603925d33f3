"""The helper that runs tests on several ranks: a hang must end, and say where."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ac_moe_ranks import Ranks, RanksError


def on_each(rank: int, add: int) -> tuple[int, int, int]:
    total = torch.tensor([rank + add])
    dist.all_reduce(total)
    return rank, total.item(), torch.get_num_threads()


def waits_for_the_other(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        a_place_to_find()


def a_place_to_find() -> None:
    time.sleep(1000)


def breaks(rank: int) -> None:
    if rank == 1:
        raise KeyError("this one")
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


def test_hang_failure_and_death_are_told_and_the_pool_recovers(tmp_path: Path) -> None:
    pool = Ranks(2, tmp_path)
    try:
        assert pool.run(on_each, add=10) == [(0, 21, 1), (1, 21, 1)]
        processes = list(pool._processes)
        with pytest.raises(RanksError) as hung:
            pool.run(waits_for_the_other, timeout=1)
        assert "hung on rank 1 (timeout 1 s), here:" in str(hung.value)
        assert "in a_place_to_find" in str(hung.value)
        assert "in waits_for_the_other" in str(hung.value).split("on rank 1")[0]
        assert all(process.poll() is not None for process in processes)

        with pytest.raises(RanksError) as broken:
            pool.run(breaks)
        assert "breaks failed on rank 1:\nTraceback" in str(broken.value)
        assert "KeyError: 'this one'" in str(broken.value)
        assert "breaks failed on rank 0:\nthe process ended\nlast words" in str(broken.value)
    finally:
        pool.close()
