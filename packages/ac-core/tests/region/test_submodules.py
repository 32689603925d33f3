"""A block is cut into what can be run again while a cache is on: everything but its attention."""

import torch
from torch import nn

from ac_core.region.submodules import submodules_beside_attention


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 8)
        self.norm = Norm()

    def forward(self, x, past_key_values=None, use_cache=False):
        return self.qkv(x)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, cache_position=None):
        return self.down(self.up(x).relu())


class AttentionLayer(nn.Module):
    """As T5's: the norm and the attention in a module of their own, and no cache in its own signature."""

    def __init__(self):
        super().__init__()
        self.attention, self.layer_norm, self.dropout = Attention(), Norm(), nn.Dropout()

    def forward(self, x, **kwargs):
        return x + self.dropout(self.attention(self.layer_norm(x), **kwargs))


class Block(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x, past_key_values=None):
        return x


def pieces(**children):
    return [name for name, _ in submodules_beside_attention("layers.0", Block(**children))]


def test_norms_and_mlps_are_pieces_and_attention_with_all_inside_it_is_not():
    block = Block(norm=Norm(), attention=Attention(), mlp=MLP())
    found = dict(submodules_beside_attention("layers.0", block))
    assert found == {"layers.0.norm": block.norm, "layers.0.mlp": block.mlp}


def test_what_lies_around_attention_is_opened():
    assert pieces(layer=nn.ModuleList([AttentionLayer(), MLP()])) == ["layers.0.layer.0.layer_norm", "layers.0.layer.1"]
    assert pieces(by_name=nn.ModuleDict({"a": Attention(), "b": MLP()})) == ["layers.0.by_name.b"]


def test_what_a_region_would_not_make_smaller_is_no_piece():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x.exp()).exp()

    same_forward = type("FSDPLinear", (nn.Linear,), {})
    assert pieces(a=nn.Linear(8, 8), b=nn.LayerNorm(8), c=nn.GELU(), d=nn.Dropout(), e=same_forward(8, 8)) == []
    assert pieces(scaled=Scaled(8, 8)) == ["layers.0.scaled"]


def test_attention_that_only_reads_the_cache_may_be_run_again():
    attention = Attention()
    attention._can_checkpoint_with_cache = True
    assert pieces(attention=attention) == ["layers.0.attention"]
