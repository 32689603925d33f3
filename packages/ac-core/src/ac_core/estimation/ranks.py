"""Ranks that are not there: a process group of torch's own `fake` backend, whose collectives move nothing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, filterfalse, islice
from math import prod

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_NUMBERS = count()
"""For names: groups of two simulations may be there at once."""


@contextmanager
def simulated_ranks(*sizes: int, names: tuple[str, ...] | None = None) -> Iterator[DeviceMesh]:
    """A mesh of ranks on the CPU, of which this process is the first, for as long as the context lasts.

    To be entered outside of the fake mode. A process group that is initialised already stays as it is: the simulated
    ones stand beside it.

    Args:
        sizes, names: of the dimensions.
    """
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=prod(sizes), store=_store())
        try:
            yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
        finally:
            dist.destroy_process_group()
        return
    rank = dist.get_rank()
    others = filterfalse(rank.__eq__, count())
    ranks = torch.tensor([rank, *islice(others, prod(sizes) - 1)]).view(sizes)
    mine = [ranks.movedim(place, -1).reshape(-1, size)[0] for place, size in enumerate(sizes)]
    with ExitStack() as stack:
        groups = [stack.enter_context(_group(along.tolist())) for along in mine]
        if len(groups) == 1:
            yield DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=names)
        else:
            yield DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)


@contextmanager
def _group(ranks: list[int]) -> Iterator[dist.ProcessGroup]:
    """A group beside those that are there. This process is the first of `ranks`."""
    # `new_group` makes none with more ranks than the default group has, and asks all of these to take part.
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        0,
        ranks,
        "fake",
        _store(),
        f"ac_core: simulated ranks {next(_NUMBERS)}",  # type: ignore[arg-type]
        timeout=distributed_c10d.default_pg_timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _store() -> dist.Store:
    # The backend registers itself when this is imported. It is there for simulations like this one, in no public place.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
