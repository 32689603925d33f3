"""What a data-parallel strategy does to a model of fake tensors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ac_core.discovery.blocks import Block, find_blocks
from ac_core.estimation.experts import expert_modules
from ac_core.estimation.ranks import simulated_ranks
from ac_core.region.contexts import ContextFn

Strategy = Literal["none", "ddp", "fsdp2"]
ShareExperts = Callable[[nn.Module, DeviceMesh], ContextFn | None]
"""Shares the experts of a model out, in place, over a mesh of the dimensions `"expert_copies"` and `"ep"`. It returns
the `context_fn` that checkpoints of the blocks need from then on, if any."""


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


@dataclass(frozen=True)
class Ranks:
    """The ranks of a simulation.

    everybody: all. grid: the same, those that share the experts along `"ep"` and those that hold copies of the same
    ones along `"expert_copies"`; None where experts are not shared. compute_dtype: of FSDP2's mixed precision.
    """

    strategy: Strategy
    everybody: DeviceMesh | None = None
    grid: DeviceMesh | None = None
    compute_dtype: torch.dtype | None = None

    def shard(self, model: nn.Module, blocks: list[Block]) -> list[Tensor]:
        """What the strategy does to a model, given its blocks; returns the communication buffers that it holds from
        then on."""
        if self.strategy == "fsdp2":
            self._fully_shard(model, blocks)
        return _buckets(model) if self.strategy == "ddp" else []

    def _fully_shard(self, model: nn.Module, blocks: list[Block]) -> None:
        """Each block a unit, what is left another: as AutoModel, torchtitan and ac-recipes do. Experts that are shared
        are units among the ranks that have the same ones."""
        reduce_dtype = torch.float32 if self.compute_dtype else None
        policy = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=reduce_dtype)
        ignored = None
        if self.grid is not None:
            copies = self.grid["expert_copies"]
            experts = [module for module in expert_modules(model) if not isinstance(module, FSDPModule)]
            if copies.size() == 1:
                ignored = {parameter for module in experts for parameter in module.parameters()}
            else:
                for module in experts:
                    fully_shard(module, mesh=copies, mp_policy=policy)
        # The units are those that ac-core finds, also where the caller checkpoints others, such as parts of these.
        for block in find_blocks(model) or blocks:
            if any(True for _ in block.module.parameters()):
                fully_shard(block.module, mesh=self.everybody, mp_policy=policy, ignored_params=ignored)
        fully_shard(model, mesh=self.everybody, mp_policy=policy, ignored_params=ignored)


@contextmanager
def ranks_of(strategy: Strategy, dp_size: int, ep_size: int, compute_dtype: torch.dtype | None) -> Iterator[Ranks]:
    """To be entered outside of the fake mode."""
    with ExitStack() as stack:
        everybody = grid = None
        if strategy == "fsdp2" or ep_size > 1:
            everybody = stack.enter_context(simulated_ranks(dp_size))
        if ep_size > 1:
            names = ("expert_copies", "ep")
            grid = stack.enter_context(simulated_ranks(dp_size // ep_size, ep_size, names=names))
        yield Ranks(strategy, everybody, grid, compute_dtype)


def _buckets(model: nn.Module) -> list[Tensor]:
    """DDP's buckets, which hold a second copy of every gradient from the first step on. Experts that were made DTensors
    are not in them.

    The wrapper itself cannot run on fake tensors: its reducer wants the result of a collective.
    """
    trained = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    return [torch.empty(parameter.numel(), dtype=parameter.dtype) for parameter in trained]
