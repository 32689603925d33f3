"""A small decoder in plain torch, and plans for it. Measured once: it is the same for every budget."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ac_core import ActivationCheckpointingConfig
from ac_core.estimation.simulate import Simulation, simulate
from ac_core.planning.course import Course
from ac_core.planning.measuring import Bench, measured

WIDTH, HIDDEN, VOCABULARY, SEQUENCE = 32, 96, 128, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """`forward(input_ids [batch, sequence], labels)` returns the loss."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.fixture(scope="session")
def decoder() -> Callable[..., Decoder]:
    return Decoder


@pytest.fixture(scope="session")
def batch() -> dict[str, Tensor]:
    ids = torch.arange(4 * SEQUENCE).reshape(4, SEQUENCE) % VOCABULARY
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="session")
def bench_for() -> Callable[..., Bench]:
    """A bench that simulates steps of a model or a factory on a batch, without an optimizer."""

    def make(model: Any, batch: Any, *, blocks: Any = None, **options: Any) -> Bench:
        def step(apply: Callable[[nn.Module], None]) -> Simulation:
            return simulate(model, batch, prepare=apply, blocks=blocks)

        return Bench(step, ActivationCheckpointingConfig(**options), blocks)

    return make


@pytest.fixture(scope="session")
def of_decoder(bench_for: Callable[..., Bench], batch: dict[str, Tensor]) -> tuple[Bench, Course, Simulation]:
    bench = bench_for(Decoder, batch)
    return bench, *measured(bench)


@pytest.fixture(scope="session")
def resident() -> Callable[[nn.Module, Any], int]:
    """Bytes of a model and its batch: what a simulated step has in memory besides what `measure` counts."""

    def count(model: nn.Module, batch: dict[str, Tensor]) -> int:
        held = {id(t): t for t in (*model.parameters(), *model.buffers(), *batch.values())}
        return bytes_of(*held.values())

    return count
