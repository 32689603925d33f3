"""Data parallelism: the wrappers that give every rank the mean of the gradients."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ac_core import find_blocks


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every block a unit of its own, over `mesh`; two dimensions are copies and shards (HSDP)."""
    for block in find_blocks(model):
        fully_shard(block.module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model in torch's `DistributedDataParallel`."""
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, process_group=mesh.get_group())


def no_gradient_exchange(model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
    """For the backward of a microbatch. DDP exchanges gradients once a step. FSDP2 does so for every microbatch: what
    it keeps between them is then its shard, and not a whole gradient on every rank."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()
