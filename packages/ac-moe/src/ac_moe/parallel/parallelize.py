"""The verb: share the experts of a Hugging Face model out over the ranks of a mesh."""

from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ac_moe._choices import choice_mistake
from ac_moe.config import MoEConfig
from ac_moe.dispatch.base import Dispatcher
from ac_moe.parallel.checks import check_division, check_model, check_tail, ep_mesh_of
from ac_moe.parallel.discovery import Experts, check_experts, find_experts
from ac_moe.parallel.dispatchers import make_dispatchers
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
    dispatcher_options: Mapping[str, object] | None = None,
) -> ExpertParallel:
    """Shares the experts of every MoE layer of `model` out over the ranks of `ep_mesh`, in place.

    Each rank keeps `num_experts / ranks` consecutive experts of each layer, and tokens travel to them. Everything else
    of the model stays as it is on every rank: the ranks are data-parallel for it, each with its own batch, and it is
    left to `fully_shard` or DDP. All ranks must run the model alike, with any numbers of tokens.

    Expert parameters become DTensors, `Shard(0)`, under their names and with the shapes of all experts. So state_dict
    keys, and checkpoints of `torch.distributed.checkpoint`, are those of the original model. `model` may be on the
    meta device. Where it is not, all ranks must hold the same weights, of which each keeps its part.

    Args:
        model: of transformers, or with experts written in the same way. What is not a layer of experts is not touched.
        ep_mesh: one-dimensional, or with a dimension named "ep".
        dispatcher: how tokens travel.
        experts: how experts multiply.
        dispatcher_recompute_cache: what `context_fn` of the result keeps of each layer for the recompute.
        gradient_reduction: what the training program does with the gradients of the ranks of one step. `mean` for DDP
            and FSDP2: gradients of experts are then divided by the number of ranks in `ep_mesh`. `sum`: they are not.
        activation_checkpointing: whether blocks will be checkpointed, if that is known. `moe_tail` is refused if not.
        dispatcher_options: further arguments of `AllToAllDispatcher` or `HybridEPDispatcher`, such as
            `{"buffer": ac_moe.reference.HybridEPBuffer}`.

    Returns:
        Which layers were found; `context_fn` for the checkpoints; `fully_shard_experts` and `clip_grad_norm_`.

    Raises:
        ValueError: an argument, or a module of the model, does not fit; `MoETailError`, which is one, names every
            condition of `moe_tail` that any layer does not meet. The model is as it was.
        TypeError: `model` is no module, or `ep_mesh` no mesh.
        ModuleNotFoundError: `hybridep` without DeepEP and without a `buffer`.
    """
    MoEConfig(dispatcher=dispatcher, experts=experts, dispatcher_recompute_cache=dispatcher_recompute_cache)
    mistake = choice_mistake("gradient_reduction", gradient_reduction, REDUCTIONS)
    if mistake is not None:
        raise ValueError(mistake)
    mesh = ep_mesh_of(ep_mesh)
    check_model(model)
    layers = find_experts(model)
    if dispatcher_recompute_cache == "moe_tail":
        check_tail(layers, dispatcher, experts, activation_checkpointing is not False)
    check_experts(layers)
    check_division(layers, mesh)
    dispatchers = make_dispatchers(layers, mesh, dispatcher, dispatcher_options or {})

    divisor = mesh.size() if gradient_reduction == "mean" else 1
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # a parameter that two layers share stays one
    for layer, layers_dispatcher in zip(layers, dispatchers, strict=True):
        _replace(layer, mesh, layers_dispatcher, divisor, sharded)
    _hide_from_ddp(model, layers)
    return ExpertParallel(
        model=model,
        layers=tuple(layers),
        mesh=mesh,
        dispatcher=dispatcher,
        dispatcher_recompute_cache=dispatcher_recompute_cache,
        gradient_reduction=gradient_reduction,
    )


def _replace(
    layer: Experts,
    mesh: DeviceMesh,
    dispatcher: Dispatcher,
    gradient_divisor: int,
    sharded: dict[nn.Parameter, nn.Parameter],
) -> None:
    for name in layer.parameter_names:
        parameter = getattr(layer.module, name)
        if parameter not in sharded:
            sharded[parameter] = shard(parameter, mesh, dispatcher.local_experts)
        layer.module.register_parameter(name, sharded[parameter])
    layer.module.forward = ExpertsForward(layer, dispatcher, gradient_divisor)
    if layer.router is not None:
        layer.router.forward = RouterForward(layer)


def _hide_from_ddp(model: nn.Module, layers: list[Experts]) -> None:
    """Ranks hold other experts under the same name: DDP must neither broadcast nor average them.

    `_set_params_and_buffers_to_ignore_for_model` is how DDP is told so; it has no public name. A test trains with DDP.
    """
    names = [f"{layer.name}.{name}" for layer in layers for name in layer.parameter_names]
    names += getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
