"""A decoder with what the policy looks for: attention, wide matmuls, a router. In plain torch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ac_core
from ac_core.selective.plan import BlockPlan


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float, *, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads, self.dropout, self.fused = 2, dropout, fused

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        else:
            y = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), dropout) @ v
        return self.o(y.transpose(1, 2).flatten(2)), None


class GatedMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Top-2 of four experts, the weights normalised in place as Mixtral's are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class DecoderBlock(nn.Module):
    def __init__(self, width: int, dropout: float, *, fused: bool, moe: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, dropout, fused=fused)
        self.mlp = Experts(width) if moe else GatedMLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x))[0])
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    def __init__(self, depth: int = 4, dropout: float = 0.0, *, fused: bool = True, moe: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(DecoderBlock(16, dropout, fused=fused, moe=moe) for _ in range(depth))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def decoder() -> Callable[..., Decoder]:
    """Builds a `Decoder` with the same weights every time."""

    def build(**options: object) -> Decoder:
        torch.manual_seed(0)
        return Decoder(**options)

    return build


@pytest.fixture
def selective() -> Callable[..., nn.Module]:
    """Checkpoints a model selectively, and returns it."""

    def apply(model: nn.Module, save: tuple[str, ...] | None = None, **options: object) -> nn.Module:
        config = ac_core.ActivationCheckpointingConfig(policy="selective", save=save, **options)
        ac_core.apply_activation_checkpointing(model, config)
        return model

    return apply


@pytest.fixture
def plan_of() -> Callable[[nn.Module, int], BlockPlan]:
    """The plan of a model's block."""

    def plan(model: nn.Module, index: int) -> BlockPlan:
        context_fn = model.layers[index].forward.context_fn
        return next(fn.plan for fn in getattr(context_fn, "context_fns", [context_fn]) if hasattr(fn, "plan"))

    return plan


@pytest.fixture
def matmuls() -> Callable[[Callable[[], object]], list[str]]:
    """The aten matmuls and attentions that a function runs, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ops(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.removeprefix("aten::")
            if name in ("mm", "addmm", "bmm") or "scaled_dot_product" in name:
                self.names.append("attention" if "scaled_dot" in name and "backward" not in name else name)
            return func(*args, **(kwargs or {}))

    def run(function: Callable[[], object]) -> list[str]:
        with Ops() as ops:
            function()
        return ops.names

    return run
