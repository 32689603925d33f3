"""Megatron-FSDP, through NVIDIA's `megatron-fsdp` package."""

from importlib.util import find_spec

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ac_core import find_blocks
from ac_recipes.errors import UsageError
from ac_recipes.extras import install_extra


def check_machine() -> None:
    """Raises UsageError where Megatron-FSDP cannot run: without a GPU, or without its package."""
    if not torch.cuda.is_available():
        raise UsageError(
            "distributed.strategy: 'megatron_fsdp' needs CUDA GPUs, and this machine has none; use 'fsdp2' or 'ddp'"
        )
    if find_spec("megatron_fsdp") is None:
        raise UsageError(
            "distributed.strategy: 'megatron_fsdp' needs the package megatron-fsdp; "
            f"{install_extra('megatron-fsdp')}, or use 'fsdp2' or 'ddp'"
        )


def megatron_fsdp(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model in Megatron-FSDP over `mesh`: parameters, gradients and optimizer sharded, every class of block a unit,
    gradients *summed* over ranks."""
    from megatron_fsdp import fully_shard_model

    return fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="dp",
        fsdp_unit_modules=list({type(block.module) for block in find_blocks(model)}),
        zero_dp_strategy="optim_grads_params",
        device=device,
        calculate_per_token_loss=True,
    )


def shard_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer of a model in Megatron-FSDP: its steps also put the new weights back into the model."""
    from megatron_fsdp import fully_shard_optimizer

    return fully_shard_optimizer(optimizer)
