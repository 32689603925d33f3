"""`enable` and `disable`: the cache on the instances of one model."""

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from ac_moe.cache.contexts import Mode, check_mode
from ac_moe.cache.region import Site
from ac_moe.megatron import collectives, hybridep, router
from ac_moe.megatron.layer import BlockForward, LayerForward
from ac_moe.megatron.replacement import Replacement, check_removable, remove_replacements
from ac_moe.megatron.requirements import check
from ac_moe.routing import site_of

# NOTE [ Whose checkpoint ]
#
# 1. Chunks that Megatron checkpoints (`recompute_granularity` full, or selective with `moe`) become regions of the
#    cache by themselves, in the mode that `enable` was given.
# 2. Where the caller runs `torch.utils.checkpoint` around Megatron's layers, its `context_fn` says the mode, and
#    `enable` makes the layers answer to it.
# 3. So `enable` cannot know whether a layer is checkpointed at all. Without a region all is as without `enable`, but
#    for `moe_tail`, which is refused in the first forward that trains without one.


def enable(model: nn.Module, mode: Mode, *, check_routing: bool | None = None) -> tuple[str, ...]:
    """Keeps what `mode` says of each MoE layer in `model`, for the recomputes of activation checkpointing.

        ac_moe.megatron.enable(model, "combine")

    Works on the instances in `model` and changes nothing else in the process; `disable` undoes it. The model's modules,
    parameters, `state_dict` and classes are the same before and after, and it can be copied and pickled as well as
    before. In every mode, `none` included, a recompute routes as its forward did, uses its HybridEP layout, and leaves
    expert loads, auxiliary losses and their logs alone. Enabling again sets the new mode.

    For the dispatchers `flex` with HybridEP, `alltoall` and `allgather`; `moe_tail` for `flex` with experts of
    `TorchGroupedExperts`. With `recompute_granularity` "full" (`uniform`, `block`) and "selective" with "moe" all is
    done. To checkpoint layers by hand, give `torch.utils.checkpoint` an `ac_moe.context_fn(mode)`.

    Args:
        model: a `GPTModel`, `TransformerBlock`, `TransformerLayer`, `MoELayer`, or what holds some.
        mode: `none`, `combine` or `moe_tail`; see `ac_moe.context_fn`.
        check_routing: compare in each recompute, over the whole expert-parallel group, which token goes where, at the
            price of one wait for the device in both phases and an all-reduce of one number in the recompute. None: for
            routers that decide by code that is not Megatron's, since that of Megatron cannot decide otherwise.

    Returns:
        The module paths of the MoE layers.

    Raises:
        TypeError: `model` is no module.
        ValueError: `mode` is none of the modes, there is no MoE layer in `model`, or a setting does not allow it: fp8,
            CUDA graphs, DeepEP's other backend, overlap of shared experts. One line for each.
        MoETailError: mode `moe_tail`; every condition that a layer does not meet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is no torch.nn.Module")
    check_mode(mode)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, MoELayer)}
    blocks = {path: module for path, module in model.named_modules() if _checkpoints_layers(module)}
    if not layers:
        raise ValueError(f"model: {type(model).__name__} holds no MoELayer of megatron-core")
    check(layers, blocks, mode)
    disable(model)
    for block in blocks.values():
        BlockForward(block, mode).install()
    for path, layer in layers.items():
        site = site_of(layer.router, path or f"MoELayer {layer.layer_number}")
        for replacement in _of_layer(layer, site, mode, check_routing):
            replacement.install()
    return tuple(layers)


def disable(model: nn.Module) -> None:
    """Undoes `enable` on `model` or a part of it; what is not enabled stays as it is.

    Raises:
        RuntimeError: a method was replaced once more since, by something that still calls the cache; undo that first.
    """
    owners = [owner for module in model.modules() for owner in _owners(module)]
    for owner in owners:
        check_removable(owner)
    for owner in owners:
        remove_replacements(owner)


def _of_layer(layer: MoELayer, site: Site, mode: Mode, check_routing: bool | None) -> Iterator[Replacement]:
    dispatcher = layer.token_dispatcher
    yield LayerForward(layer, mode, site)
    yield router.RouterForward(layer.router, site)
    yield router.Routing(layer.router, site, dispatcher, check_routing)
    match layer.config.moe_token_dispatcher_type:
        case "flex":
            manager = dispatcher._comm_manager
            yield hybridep.SetupMetadata(manager)
            yield hybridep.Dispatch(manager, site)
            yield hybridep.Combine(manager, site)
        case "alltoall":
            yield collectives.AllToAllPostponed(dispatcher)
            yield collectives.AllToAllCombine(dispatcher, site)
        case "allgather":
            yield collectives.AllGatherCombine(dispatcher, site)


def _checkpoints_layers(module: nn.Module) -> bool:
    # The second is what multi-token prediction has.
    return isinstance(module, TransformerBlock) or hasattr(module, "_checkpointed_forward")


def _owners(module: nn.Module) -> list[Any]:
    """`module`, and what it holds that is no module and may have replacements."""
    dispatcher = getattr(module, "token_dispatcher", None)
    manager = getattr(dispatcher, "_comm_manager", None)
    return [module, *(owner for owner in (dispatcher, manager) if owner is not None)]
