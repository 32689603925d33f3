"""Expert parallelism, through ac_moe."""

from typing import TYPE_CHECKING, Any

from torch import nn

from ac_moe import MoEConfig
from ac_recipes.errors import UsageError
from ac_recipes.parallel.meshes import Meshes

if TYPE_CHECKING:
    from ac_moe import ExpertParallel


def share_experts(
    model: nn.Module, backend: MoEConfig, meshes: Meshes, *, checkpointing: bool
) -> "tuple[ExpertParallel, str]":
    """Share the experts of `model` out over `meshes.ep`, in place; copies of the same experts become units of FSDP2.

    On a CPU `hybridep` is ac_moe's reference of HybridEP in plain torch.distributed: DeepEP's kernels are for GPUs.

    Returns:
        What ac_moe says of it, and the dispatcher's name with what stands for it.

    Raises:
        UsageError: the experts cannot be shared out as asked, with ac_moe's reason.
    """
    import ac_moe

    options: dict[str, Any] = {}
    told = backend.dispatcher
    if backend.dispatcher == "hybridep" and meshes.data.device.type == "cpu":
        options["buffer"] = ac_moe.reference.HybridEPBuffer
        told = "hybridep, reference"
    try:
        sharded = ac_moe.parallelize(
            model,
            meshes.ep,
            dispatcher=backend.dispatcher,
            experts=backend.experts,
            dispatcher_recompute_cache=backend.dispatcher_recompute_cache,
            activation_checkpointing=checkpointing,
            dispatcher_options=options,
        )
    except (ValueError, ModuleNotFoundError) as error:
        raise UsageError(f"model.backend: {' '.join(str(error).split())}") from error
    sharded.fully_shard_experts(meshes.expert_copies)
    return sharded, told
