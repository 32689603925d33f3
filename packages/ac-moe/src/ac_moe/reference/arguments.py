"""What a HybridEP buffer may be given."""

import torch


def routing(
    tokens: int,
    *,
    routing_map: torch.Tensor | None,
    probs: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    num_of_experts: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The routing map and the probabilities, whichever way they are given."""
    if routing_map is None:
        if topk_idx is None or num_of_experts is None:
            raise ValueError("routing_map: None, and no handle; give it, or topk_idx with num_of_experts")
        routing_map = topk_idx.new_zeros((tokens, num_of_experts), dtype=torch.bool)
        routing_map.scatter_(1, topk_idx.long(), True)
        if topk_weights is not None:
            probs = topk_weights.new_zeros((tokens, num_of_experts)).scatter_(1, topk_idx.long(), topk_weights)
    if routing_map.dtype != torch.bool or routing_map.ndim != 2 or routing_map.shape[0] != tokens:
        raise ValueError(
            f"routing_map: {routing_map.dtype} {list(routing_map.shape)} does not fit; "
            f"expected bool [{tokens}, experts]"
        )
    return routing_map, probs


def float32(probs: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if probs.dtype != torch.float32 or probs.shape != shape:
        raise ValueError(f"probs: {probs.dtype} {list(probs.shape)} does not fit; expected float32 {list(shape)}")
    return probs


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def refuse_fp8(use_fp8: bool | None, scaling_factor: torch.Tensor | None) -> None:
    if use_fp8 or scaling_factor is not None:
        raise ValueError("use_fp8, scaling_factor: the reference has no fp8; take DeepEP's own HybridEPBuffer for it")
