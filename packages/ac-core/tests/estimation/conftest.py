"""A small decoder in plain torch, and what a step of it really takes."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

VOCABULARY, WIDTH, HEADS = 512, 64, 4


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(width), Attention(width)
        self.norm2, self.mlp = RMSNorm(width), MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """A language model that takes `input_ids` and `labels` and returns `loss` and `logits`."""

    def __init__(self, depth: int = 4, width: int = WIDTH, dropout: float = 0.0, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


@pytest.fixture
def decoder() -> type[Decoder]:
    return Decoder


@pytest.fixture
def real_peak() -> Callable[..., int]:
    """The most bytes that torch's CPU allocator has given out at once in the second of two training steps."""

    def of(
        build: Callable[[], nn.Module],
        batch: dict[str, Tensor],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
        microbatches: int = 1,
    ) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model = build()
            batch = {name: value.clone() for name, value in batch.items()}
            stepper = optimizer([p for p in model.parameters() if p.requires_grad])
            for _ in range(2):
                with record_function("step begins"):
                    pass
                for _ in range(microbatches):
                    loss = model(**batch).loss
                    loss.backward()
                    del loss
                stepper.step()
                stepper.zero_grad(set_to_none=True)
        now = peak = 0
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
            elif event.name() == "step begins":
                peak = now
        return peak

    return of
