"""Ranks that are not there: a process group of torch's own `fake` backend, whose collectives move nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, filterfalse, islice

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_NUMBERS = count()
"""For names: groups of two simulations may be there at once."""


@contextmanager
def simulated_ranks(size: int) -> Iterator[DeviceMesh]:
    """A mesh of `size` ranks on the CPU, of which this process is the first, for as long as the context lasts.

    To be entered outside of the fake mode. A process group that is initialised already stays as it is: the simulated
    one stands beside it.
    """
    # The backend registers itself when this is imported. It is there for simulations like this one, in no public place.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        try:
            yield init_device_mesh("cpu", (size,))
        finally:
            dist.destroy_process_group()
        return
    # `new_group` makes none with more ranks than the default group has, and asks all of these to take part.
    rank = dist.get_rank()
    ranks = [rank, *islice(filterfalse(rank.__eq__, count()), size - 1)]
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        0,
        ranks,
        "fake",
        FakeStore(),
        f"ac_core: simulated ranks {next(_NUMBERS)}",  # type: ignore[arg-type]
        timeout=distributed_c10d.default_pg_timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    try:
        yield DeviceMesh.from_group(group, "cpu")
    finally:
        dist.destroy_process_group(group)
