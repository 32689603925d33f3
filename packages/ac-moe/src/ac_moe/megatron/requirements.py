"""What Megatron's settings must be for the cache, checked before the first step."""

import inspect
from collections.abc import Collection, Mapping

from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer

from ac_moe.cache.conditions import LayerFacts, check_moe_tail
from ac_moe.megatron.experts import TorchGroupedExperts


def check(layers: Mapping[str, MoELayer], blocks: Collection[str], mode: str) -> None:
    """Refuses what the cache cannot do.

    Args:
        layers: the MoE layers, by module path.
        blocks: module paths of what checkpoints whole layers.
        mode: of the cache.

    Raises:
        ImportError: this megatron-core checkpoints by a function of another signature.
        MoETailError: mode `moe_tail`; every condition that a layer does not meet.
        ValueError: one line for each setting that cannot be.
    """
    parameters = list(inspect.signature(tensor_parallel.checkpoint).parameters)
    if parameters[:2] != ["function", "distribute_saved_activations"]:
        raise ImportError(
            "ac-moe knows megatron.core.tensor_parallel.checkpoint(function, distribute_saved_activations, *args), as "
            f"megatron-core 0.16 to 0.20 have it; here it is {parameters}. Install one of these, or report this."
        )
    mistakes: dict[str, None] = {}
    for name, layer in layers.items():
        inside = any(name.startswith(f"{path}." if path else "") for path in blocks)
        mistakes |= dict.fromkeys(_mistakes(layer, inside_block=inside))
    if mistakes:
        raise ValueError("\n".join(mistakes))
    if mode == "moe_tail":
        check_moe_tail({name: facts(layer) for name, layer in layers.items()})


def _mistakes(layer: MoELayer, *, inside_block: bool) -> list[str]:
    config = layer.config
    dispatcher = config.moe_token_dispatcher_type
    backend = config.moe_flex_dispatcher_backend
    found = {
        "fp8, fp4: Megatron then checkpoints through Transformer Engine, which replays scaling factors and does not "
        "say where a recompute begins; train checkpointed layers in bf16, or without ac-moe": config.fp8 or config.fp4,
        f"moe_flex_dispatcher_backend: {backend!r} keeps its routing where only its own backward can read it; use "
        "'hybridep'": dispatcher == "flex" and backend != "hybridep",
        f"moe_token_dispatcher_type: {dispatcher!r} is not known; use 'flex', 'alltoall' or 'allgather'": (
            dispatcher not in {"flex", "alltoall", "allgather"}
        ),
        "moe_shared_expert_overlap: True; shared experts are then added inside of the combine, in pieces; set it to "
        "False": config.moe_shared_expert_overlap,
        "overlap_moe_expert_parallel_comm: True; the layer's forward is then not called but taken apart; set it to "
        "False": getattr(config, "overlap_moe_expert_parallel_comm", False),
        f"cuda_graph_impl: {getattr(config, 'cuda_graph_impl', 'none')!r}; a replayed graph runs no Python, and the "
        "cache is Python; set it to 'none'": getattr(config, "cuda_graph_impl", "none") != "none",
        "recompute_granularity: 'full' is done by the TransformerBlock, which is not in what was given; enable the "
        "block or the whole model": config.recompute_granularity == "full" and not inside_block,
    }
    return [text for text, holds in found.items() if holds]


def facts(layer: MoELayer) -> LayerFacts:
    """What `moe_tail` asks about `layer`."""
    config, experts = layer.config, layer.experts
    ours = isinstance(experts, TorchGroupedExperts) and type(experts).forward is TorchGroupedExperts.forward
    flex = config.moe_token_dispatcher_type == "flex"
    return LayerFacts(
        activation_checkpointing=True,  # may be by hand: see NOTE [ Whose checkpoint ] in ac_moe.megatron.enabling
        dispatcher=config.moe_flex_dispatcher_backend if flex else f"Megatron's {config.moe_token_dispatcher_type}",
        experts="torch_mm" if ours else type(experts).__name__,
        expert_bias=bool(config.add_bias_linear),
        weight_applied_after=False,  # no experts of Megatron's do
        fp8=bool(config.fp8 or config.fp4),
        latent=bool(config.moe_latent_size),
        other_reader="a forward hook of the experts" if experts._forward_hooks else None,
    )
