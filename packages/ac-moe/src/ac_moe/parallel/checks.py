"""What `parallelize` refuses of a mesh, a model and a mode, before it changes anything."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ac_moe.cache.conditions import LayerFacts, check_moe_tail
from ac_moe.parallel.discovery import Experts
from ac_moe.parallel.forwards import ExpertsForward


def ep_mesh_of(mesh: DeviceMesh) -> DeviceMesh:
    """The expert-parallel dimension of `mesh`.

    Raises:
        TypeError, ValueError: it is no mesh, has several dimensions and none is called "ep", or is without this rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"ep_mesh: {type(mesh).__name__} is not a DeviceMesh; "
            'give init_device_mesh(device, (ranks,), mesh_dim_names=("ep",))'
        )
    if mesh.ndim > 1:
        names = mesh.mesh_dim_names or ()
        if "ep" not in names:
            named = f"named {', '.join(names)}" if names else "without names"
            raise ValueError(f"ep_mesh: has {mesh.ndim} dimensions, {named}; it must have one, or one named 'ep'")
        mesh = mesh["ep"]
    if mesh.get_coordinate() is None:
        raise ValueError(f"ep_mesh: rank {dist.get_rank()} is not in {mesh}")
    return mesh


def check_model(model: nn.Module) -> None:
    """Raises TypeError or ValueError for a model that has been changed already, or whose blocks read all experts."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise ValueError(f"model: {name or 'it'} is wrapped in {type(module).__name__}; parallelize first")
        if isinstance(vars(module).get("forward"), ExpertsForward):
            raise ValueError(f"model: {name} is parallelized already")
    if getattr(model, "use_kernels", False):
        raise ValueError(
            "model: was loaded with use_kernels=True, which may replace MoE blocks as a whole by kernels that read all "
            "experts; load it without"
        )


def check_division(layers: list[Experts], mesh: DeviceMesh) -> None:
    """Raises ValueError unless the ranks of `mesh` can have equal numbers of experts of each layer."""
    size = mesh.size()
    wrong = [f"{layer.name} has {layer.num_experts}" for layer in layers if layer.num_experts % size]
    if wrong:
        raise ValueError(
            f"ep_mesh: experts cannot be shared equally by {size} ranks, num_experts must be a multiple of {size}: "
            + ", ".join(wrong)
        )


def check_replicas(mesh: DeviceMesh, ep_mesh: DeviceMesh) -> None:
    """Raises TypeError or ValueError unless the ranks of `mesh` hold copies of this rank's experts."""
    example = 'mesh["replica"] of init_device_mesh(device, (world // ep, ep), mesh_dim_names=("replica", "ep"))'
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: {type(mesh).__name__} is not a DeviceMesh; give {example}")
    others = set(mesh.mesh.flatten().tolist()) & set(ep_mesh.mesh.flatten().tolist()) - {dist.get_rank()}
    if others:
        raise ValueError(
            f"mesh: {mesh} holds ranks {sorted(others)}, which have other experts than rank {dist.get_rank()}; give "
            f"the ranks with copies of the same experts: {example}"
        )


def check_tail(layers: list[Experts], dispatcher: str, experts: str, activation_checkpointing: bool) -> None:
    """Raises MoETailError with every condition of `moe_tail` that some layer does not meet."""
    check_moe_tail(
        {
            layer.name: LayerFacts(
                activation_checkpointing=activation_checkpointing,
                dispatcher=dispatcher,
                experts=experts,
                expert_bias=layer.has_bias,
                weight_applied_after=layer.weighted_after,
                fp8=any(p.dtype.itemsize == 1 for p in layer.module.parameters(recurse=False)),
                lora_on_down=layer.has_lora,
                other_reader="the norm after the experts" if layer.has_norm else None,
            )
            for layer in layers
        }
    )
