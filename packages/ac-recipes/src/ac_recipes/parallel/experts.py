"""Expert parallelism, through ac_moe."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ac_moe import MoEConfig
from ac_recipes.errors import UsageError

if TYPE_CHECKING:
    from ac_moe import ExpertParallel


def share_experts(
    model: nn.Module,
    backend: MoEConfig,
    ep: DeviceMesh,
    copies: DeviceMesh,
    *,
    device: torch.device,
    checkpointing: bool,
) -> "tuple[ExpertParallel, str]":
    """Share the experts of `model` out over the ranks of `ep`, in place. Those of a layer become a unit of FSDP2 over
    `copies`, the ranks that hold the same ones.

    On a CPU `hybridep` is ac_moe's reference of HybridEP in plain torch.distributed: DeepEP's kernels are for GPUs.

    Returns:
        What ac_moe says of it, and the dispatcher's name with what stands for it.

    Raises:
        UsageError: the experts cannot be shared out as asked, with ac_moe's reason.
    """
    import ac_moe

    options: dict[str, Any] = {}
    told = backend.dispatcher
    if backend.dispatcher == "hybridep" and device.type == "cpu":
        options["buffer"] = ac_moe.reference.HybridEPBuffer
        told = "hybridep, reference"
    try:
        sharded = ac_moe.parallelize(
            model,
            ep,
            dispatcher=backend.dispatcher,
            experts=backend.experts,
            dispatcher_recompute_cache=backend.dispatcher_recompute_cache,
            activation_checkpointing=checkpointing,
            dispatcher_options=options,
        )
    except (ValueError, ModuleNotFoundError) as error:
        raise UsageError(f"model.backend: {' '.join(str(error).split())}") from error
    sharded.fully_shard_experts(copies)
    return sharded, told
