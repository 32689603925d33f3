"""The verb: share the experts of a Hugging Face model out over the ranks of a mesh."""

from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ac_moe._choices import choice_mistake
from ac_moe.cache.conditions import LayerFacts, check_moe_tail
from ac_moe.config import MoEConfig
from ac_moe.dispatch.alltoall import AllToAllDispatcher
from ac_moe.parallel.discovery import Experts, check_experts, find_experts
from ac_moe.parallel.forwards import ExpertsForward, RouterForward
from ac_moe.parallel.parameters import shard
from ac_moe.parallel.result import ExpertParallel

REDUCTIONS = ("mean", "sum")


def parallelize(
    model: nn.Module,
    ep_mesh: DeviceMesh,
    *,
    dispatcher: Literal["alltoall", "hybridep"] = "alltoall",
    experts: Literal["torch_mm"] = "torch_mm",
    dispatcher_recompute_cache: Literal["none", "combine", "moe_tail"] = "none",
    gradient_reduction: Literal["mean", "sum"] = "mean",
    activation_checkpointing: bool | None = None,
) -> ExpertParallel:
    """Shares the experts of every MoE layer of `model` out over the ranks of `ep_mesh`, in place.

    Each rank keeps `num_experts / ranks` consecutive experts of each layer, and tokens travel to them. Everything else
    of the model stays as it is on every rank: the ranks are data-parallel for it, each with its own batch, and it is
    left to `fully_shard` or DDP. All ranks must call the model alike, with any number of tokens.

    Expert parameters become DTensors, `Shard(0)`, under their names and with the shapes of all experts. So state_dict
    keys, and checkpoints of `torch.distributed.checkpoint`, are those of the original model. `model` may be on the
    meta device. Where it is not, all ranks should hold the same weights; each keeps its part of its own copy.

    Args:
        model: of transformers, or with experts written in the same way. What is not a layer of experts is not touched.
        ep_mesh: one-dimensional, or with a dimension named "ep".
        dispatcher: how tokens travel.
        experts: how experts multiply.
        dispatcher_recompute_cache: what `context_fn` of the result keeps of each layer for the recompute.
        gradient_reduction: what the training program does with the gradients of the ranks of one step. `mean` for DDP
            and FSDP2: gradients of experts are then divided by the number of ranks in `ep_mesh`. `sum`: they are not.
        activation_checkpointing: whether the blocks will be checkpointed, if that is known.

    Returns:
        Which layers were found; `context_fn` for the checkpoints; `fully_shard_experts` and `clip_grad_norm_`.

    Raises:
        ValueError: an argument, or a module of the model, does not fit; `MoETailError`, which is one, names every
            condition of `moe_tail` that any layer does not meet. The model is as it was.
        TypeError: `model` is no module, or `ep_mesh` no mesh.
    """
    MoEConfig(dispatcher=dispatcher, experts=experts, dispatcher_recompute_cache=dispatcher_recompute_cache)
    mistake = choice_mistake("gradient_reduction", gradient_reduction, REDUCTIONS, REDUCTIONS)
    if mistake is not None:
        raise ValueError(mistake)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module")
    mesh = _ep_mesh(ep_mesh)
    _check_model(model)
    layers = find_experts(model)
    if dispatcher_recompute_cache == "moe_tail":
        check_moe_tail(
            {layer.name: _facts(layer, dispatcher, experts, activation_checkpointing is not False) for layer in layers}
        )
    check_experts(layers)
    _check_division(layers, mesh)

    sharded: dict[nn.Parameter, nn.Parameter] = {}  # a parameter that two layers share stays one
    for layer in layers:
        _replace(layer, mesh, mesh.size() if gradient_reduction == "mean" else 1, sharded)
    result = ExpertParallel(
        model=model,
        layers=tuple(layers),
        mesh=mesh,
        dispatcher=dispatcher,
        dispatcher_recompute_cache=dispatcher_recompute_cache,
        gradient_reduction=gradient_reduction,
    )
    _hide_from_ddp(result)
    return result


def _replace(
    layer: Experts, mesh: DeviceMesh, gradient_divisor: int, sharded: dict[nn.Parameter, nn.Parameter]
) -> None:
    group = mesh.get_group()
    dispatcher = AllToAllDispatcher(
        layer.num_experts, None if group is dist.group.WORLD else group, name=f"{layer.name} (dispatcher)"
    )
    for name in layer.parameter_names:
        parameter = getattr(layer.module, name)
        if parameter not in sharded:
            sharded[parameter] = shard(parameter, mesh, dispatcher.local_experts)
        layer.module.register_parameter(name, sharded[parameter])
    layer.module.forward = ExpertsForward(layer, dispatcher, gradient_divisor)
    if layer.router is not None:
        layer.router.forward = RouterForward(layer)


def _facts(layer: Experts, dispatcher: str, experts: str, activation_checkpointing: bool) -> LayerFacts:
    return LayerFacts(
        activation_checkpointing=activation_checkpointing,
        dispatcher=dispatcher,
        experts=experts,
        expert_bias=layer.has_bias,
        weight_applied_after=layer.weighted_after,
        fp8=any(p.dtype.itemsize == 1 for p in layer.module.parameters(recurse=False)),
        lora_on_down=layer.has_lora,
        other_reader="the norm after the experts" if layer.has_norm else None,
    )


def _hide_from_ddp(result: ExpertParallel) -> None:
    """Ranks hold other experts under the same name: DDP must neither broadcast nor average them.

    `_set_params_and_buffers_to_ignore_for_model` is how DDP is told so; it has no public name. A test trains with DDP.
    """
    names = [f"{layer.name}.{name}" for layer in result.layers for name in layer.parameter_names]
    names += getattr(result.model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(result.model, names)


def _ep_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"ep_mesh: {type(mesh).__name__} is not a DeviceMesh; "
            'give init_device_mesh(device, (ranks,), mesh_dim_names=("ep",))'
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1:
        if "ep" not in names:
            raise ValueError(
                f"ep_mesh: has {mesh.ndim} dimensions, named {names or 'nothing'}; it must have one, or one named 'ep'"
            )
        mesh = mesh["ep"]
    if mesh.get_coordinate() is None:
        raise ValueError(f"ep_mesh: rank {dist.get_rank()} is not in {mesh}")
    return mesh


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), ExpertsForward):
            raise ValueError(f"model: {name} is parallelized already")
    if getattr(model, "use_kernels", False):
        raise ValueError(
            "model: was loaded with use_kernels=True, which may replace MoE blocks as a whole and read all experts; "
            "load it without"
        )


def _check_division(layers: list[Experts], mesh: DeviceMesh) -> None:
    size = mesh.size()
    wrong = [f"{layer.name} has {layer.num_experts}" for layer in layers if layer.num_experts % size]
    if wrong:
        raise ValueError(
            f"ep_mesh: experts cannot be shared equally by {size} ranks; num_experts must be a multiple: "
            + ", ".join(wrong)
        )
