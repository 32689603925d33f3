"""A decoder as large models have it, in plain torch: RMS norms, grouped queries, fused attention, a gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KEY_HEADS, HIDDEN, VOCABULARY = 32, 4, 2, 48, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, HEADS * self.size, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * self.size, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * self.size, bias=False)
        self.o = nn.Linear(HEADS * self.size, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # The number of heads is left to the projections: under tensor parallelism a rank has some of them.
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.attention = Attention()
        self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """`forward(ids [batch, sequence], labels)` returns the loss."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


class Adapted(nn.Module):
    """A frozen linear layer with a trainable product of two thin ones beside it, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def with_adapters(decoder: Decoder) -> Decoder:
    """Only adapters beside the projections of queries, values and the MLP's output are trainable."""
    torch.manual_seed(1)
    decoder.requires_grad_(False)
    for layer in decoder.layers:
        layer.attention.q, layer.attention.v = Adapted(layer.attention.q), Adapted(layer.attention.v)
        layer.mlp.down = Adapted(layer.mlp.down)
    return decoder


def with_lower_half_frozen(decoder: Decoder) -> Decoder:
    """Embedding and the lower blocks are frozen."""
    for module in (decoder.embed, *decoder.layers[: len(decoder.layers) // 2 + 1]):
        module.requires_grad_(False)
    return decoder
