"""Tiny MoE models of transformers, and the steps that the tests of `ac_moe.parallelize` compare."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

HIDDEN, EXPERTS, LAYERS, VOCABULARY = 16, 4, 2, 64
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
# What each architecture names otherwise, and what it needs besides.
CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 8, "head_dim": 8}),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8}),
}
NAMES = tuple(CONFIGS)


def build(name: str, **options: object) -> nn.Module:
    """The same model on every call and rank, with a routing bias and expert biases that matter where it has them."""
    import transformers

    prefix, own = CONFIGS[name]
    config = getattr(transformers, f"{prefix}Config")(**(_COMMON | own | options))
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" not in key and tensor.is_floating_point() and not tensor.is_meta:
                tensor.normal_(std=0.2)
    return model


def mesh(*sizes: int) -> DeviceMesh:
    """`ep`, or `replica` and `ep`."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "ep")[-len(sizes) :])


def batch(rank: int, number: int = 0, lengths: tuple[int, ...] = (5, 8, 3, 6)) -> torch.Tensor:
    """Tokens of one rank and microbatch; ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(1, VOCABULARY, (2, lengths[rank]), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor, **options: object) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens, **options).loss


def one_process(
    name: str, *, ranks: int = 2, microbatches: int = 1, of: Callable = loss_of, **options: object
) -> dict[str, torch.Tensor]:
    """Gradients of the mean over ranks of their losses, all computed here by the model as transformers made it."""
    model = build(name, **options).train()
    for number in range(microbatches):
        (sum(of(model, batch(rank, number)) for rank in range(ranks)) / ranks).backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


def average_dense_gradients(model: nn.Module) -> None:
    """What DDP would do."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def whole(tensors: Iterator[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor | None]:
    return {
        key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in tensors
    }


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Of all experts, on every rank."""
    return whole((key, parameter.grad) for key, parameter in model.named_parameters())


def furthest(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of any parameter's gradient, relative to the largest number in it."""
    assert actual.keys() == expected.keys()
    told = []
    for key, wanted in expected.items():
        assert wanted.abs().max() > 1e-5, f"{key}: no gradient to compare"
        assert actual[key].shape == wanted.shape
        told.append((((actual[key] - wanted).abs().max() / wanted.abs().max()).item(), key))
    return max(told)


def checkpoint_layers(model: nn.Module, context_fn: Callable, **options: object) -> None:
    """Plain torch checkpoint around each decoder layer."""

    def wrap(layer: nn.Module) -> Callable:
        original = layer.forward
        return lambda *args, **kwargs: checkpoint(
            original, *args, use_reentrant=False, context_fn=context_fn, **options, **kwargs
        )

    for layer in model.model.layers:
        layer.forward = wrap(layer)
