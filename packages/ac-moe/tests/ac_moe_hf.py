"""Tiny MoE models of transformers, one written in their manner, and the steps that `parallelize` is tested with."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

HIDDEN, WIDE, EXPERTS, LAYERS, VOCABULARY = 16, 8, 4, 2, 64
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
    "eos_token_id": 1,
    "attn_implementation": "eager",
    "experts_implementation": "eager",  # the only one that takes float64
}
# What each architecture names otherwise, and what it needs besides.
_OWN: dict[str, dict[str, object]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": WIDE, "head_dim": 8},
    "Olmoe": {"num_experts": EXPERTS},
    "DeepseekV3": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": WIDE,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "GptOss": {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8},
}
FAMILIES = tuple(_OWN)


def build(family: str, dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """The same model on every call and rank; every parameter matters, and so does a router's bias."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**(_COMMON | _OWN[family] | options))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return filled(model).to(dtype).train()


def filled(model: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" not in key:
                tensor.normal_(std=0.2)
    return model


class Experts(nn.Module):
    """Experts as transformers describes them; here every expert computes every token."""

    def __init__(
        self,
        experts: int = EXPERTS,
        *,
        has_gate: bool = True,
        has_bias: bool = False,
        is_transposed: bool = False,
        has_post_expert_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = experts
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        self.has_post_expert_norm = has_post_expert_norm
        self.act_fn = nn.SiLU()
        if has_post_expert_norm:
            self.post_expert_norm = nn.RMSNorm(HIDDEN, elementwise_affine=False)
        up, width = ("gate_up_proj", 2 * WIDE) if has_gate else ("up_proj", WIDE)
        for name, out, into in ((up, width, HIDDEN), ("down_proj", HIDDEN, WIDE)):
            shape = (experts, into, out) if is_transposed else (experts, out, into)
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.2))
            if has_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(experts, out) * 0.2))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _project(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        """`[tokens, experts, in]` to `[tokens, experts, out]`."""
        weight = getattr(self, name)
        outputs = torch.einsum("tei,eio->teo" if self.is_transposed else "tei,eoi->teo", inputs, weight)
        return outputs + getattr(self, f"{name}_bias") if self.has_bias else outputs

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        everywhere = hidden_states[:, None].expand(-1, self.num_experts, -1)
        inner = self._project("gate_up_proj" if self.has_gate else "up_proj", everywhere)
        outputs = self._project("down_proj", self._apply_gate(inner) if self.has_gate else self.act_fn(inner))
        if self.has_post_expert_norm:
            outputs = self.post_expert_norm(outputs)
        weights = torch.zeros_like(outputs[..., 0]).scatter(1, top_k_index, top_k_weights.to(outputs.dtype))
        return torch.einsum("teh,te->th", outputs, weights)


class Block(nn.Module):
    def __init__(self, experts: int = EXPERTS, **description: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts)
        self.experts = Experts(experts, **description)
        self.scale = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return x + self.scale * self.experts(x, ids, weights)


class StandIn(nn.Module):
    """A model that needs no transformers, with the same call."""

    def __init__(self, experts: int = EXPERTS, **description: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block(experts, **description) for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.embedding(input_ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        logits = x @ self.embedding.weight.T
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels.flatten()))


def mesh(*sizes: int) -> DeviceMesh:
    """`ep`, or `replica` and `ep`."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "ep")[-len(sizes) :])


def batch(rank: int, number: int = 0) -> torch.Tensor:
    """Tokens of one rank and microbatch; ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(2, VOCABULARY, (2, (5, 8, 3, 6)[rank]), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def one_process(model: nn.Module, *, microbatches: int = 1, ranks: int = 2) -> dict[str, torch.Tensor]:
    """Gradients of the mean over ranks of their losses, all computed here by the model as it was made."""
    for number in range(microbatches):
        (sum(loss_of(model, batch(rank, number)) for rank in range(ranks)) / ranks).backward()
    return gradients(model)


def average_dense_gradients(model: nn.Module) -> None:
    """What DDP would do."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def whole(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All of each tensor, on every rank."""
    return {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in tensors}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return whole((key, p.grad) for key, p in model.named_parameters() if p.grad is not None)


def furthest(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any gradient, relative to the largest number in that gradient."""
    assert actual.keys() == expected.keys()
    worst = 0.0
    for key, wanted in expected.items():
        assert wanted.abs().max() > 1e-5, f"{key}: no gradient to compare"
        worst = max(worst, ((actual[key] - wanted).abs().max() / wanted.abs().max()).item())
    return worst


def checkpoint_layers(model: nn.Module, context_fn: Callable, **options: object) -> None:
    """torch's own checkpoint around each decoder layer."""

    def wrapped(original: Callable) -> Callable:
        return lambda *args, **kwargs: checkpoint(
            original, *args, use_reentrant=False, context_fn=context_fn, **options, **kwargs
        )

    for layer in getattr(model, "model", model).layers:
        layer.forward = wrapped(layer.forward)
