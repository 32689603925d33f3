"""What a data-parallel strategy does to a model of fake tensors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ac_core.discovery.blocks import Block, find_blocks
from ac_core.estimation.experts import expert_modules
from ac_core.estimation.ranks import simulated_ranks

Strategy = Literal["none", "ddp", "fsdp2"]
Shard = Callable[[nn.Module, list[Block]], list[Tensor]]
"""Prepares a model, given its blocks, and returns the communication buffers that it has from then on."""


def check_strategy(strategy: str, dp_size: int, ep_size: int) -> None:
    """Raises ValueError for a setting that has no such value."""
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy: {strategy!r} is not one of {', '.join(map(repr, get_args(Strategy)))}")
    for name, size in (("dp_size", dp_size), ("ep_size", ep_size)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: {size!r} is not a whole number of ranks, at least 1")
    if strategy == "none" and dp_size > 1:
        raise ValueError(f"dp_size: {dp_size} ranks need a strategy, 'ddp' or 'fsdp2'; 'none' is one process")
    if dp_size % ep_size:
        raise ValueError(f"ep_size: the {dp_size} ranks of dp_size cannot be divided into groups of {ep_size}")


@contextmanager
def sharding(strategy: Strategy, dp_size: int, ep_size: int, compute_dtype: torch.dtype | None) -> Iterator[Shard]:
    """What to do to a model, inside of the context. To be entered outside of the fake mode."""
    if strategy == "fsdp2":
        with ExitStack() as stack:
            everybody = stack.enter_context(simulated_ranks(dp_size))
            alike = stack.enter_context(simulated_ranks(dp_size // ep_size)) if 1 < ep_size < dp_size else None
            meshes = _Meshes(everybody, alike, distributed=ep_size > 1)
            yield lambda model, blocks: _shard(model, blocks, meshes, compute_dtype)
    elif strategy == "ddp":
        yield _buckets
    else:
        yield lambda _model, _blocks: []


@dataclass(frozen=True)
class _Meshes:
    """everybody: all ranks. alike: those that have the same experts, if any but this one. distributed: the experts."""

    everybody: DeviceMesh
    alike: DeviceMesh | None
    distributed: bool


def _shard(model: nn.Module, blocks: list[Block], meshes: _Meshes, compute_dtype: torch.dtype | None) -> list[Tensor]:
    """Each block a unit, what is left another: as AutoModel, torchtitan and ac-recipes do. Experts that are distributed
    are units among the ranks that have the same ones."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    experts = expert_modules(model) if meshes.distributed else []
    ignored = None
    if meshes.alike is None:
        ignored = {parameter for module in experts for parameter in module.parameters()}
    else:
        for module in experts:
            fully_shard(module, mesh=meshes.alike, mp_policy=policy)
    # The units are those that ac-core finds, also where the caller checkpoints other modules, such as parts of these.
    for block in find_blocks(model) or blocks:
        if any(True for _ in block.module.parameters()):
            fully_shard(block.module, mesh=meshes.everybody, mp_policy=policy, ignored_params=ignored)
    fully_shard(model, mesh=meshes.everybody, mp_policy=policy, ignored_params=ignored)
    return []


def _buckets(model: nn.Module, _: list[Block]) -> list[Tensor]:
    """DDP's buckets, which hold a second copy of every gradient from the first step on.

    The wrapper itself cannot run on fake tensors: its reducer wants the result of a collective.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [torch.empty(parameter.numel(), dtype=parameter.dtype) for parameter in trainable]
