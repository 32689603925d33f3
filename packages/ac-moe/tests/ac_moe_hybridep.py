"""The model of `ac_moe_model` on a HybridEP that orders rows anew, and checkpoints of every kind that pin."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from ac_moe_model import EXPERTS, Forward, GroupedLayer, Layer, build, recompute
from torch import nn
from torch.utils.checkpoint import checkpoint

import ac_moe
from ac_moe.reference.layout import Layout

KINDS = ("early stop", "to the end", "reentrant")
SCHEDULES = {
    "sequential": "f0 b0 f1 b1 f2 b2 f3 b3",
    "1f1b": "f0 f1 b0 f2 b1 f3 b2 b3",
    "lifo": "f0 f1 f2 f3 b3 b2 b1 b0",
    "any": "f0 f1 f2 b1 f3 b3 b0 b2",
}
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all_single", "barrier")


class JitteredBuffer(ac_moe.reference.HybridEPBuffer):
    """Orders the rows inside an expert's block anew for each layout, the same for the n-th layout since `restart`."""

    layouts = 0

    @classmethod
    def restart(cls) -> None:
        cls.layouts = 0

    def _permutation(self, layout: Layout, pad_multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
        places, counts = super()._permutation(layout, pad_multiple)
        generator = torch.Generator().manual_seed(JitteredBuffer.layouts)
        JitteredBuffer.layouts += 1
        for place in places.unbind(1):
            (rows,) = (place >= 0).nonzero(as_tuple=True)
            place[rows] = place[rows[torch.randperm(len(rows), generator=generator)]]
        return places, counts


def build_hybridep(
    layers: int = 3,
    form: str = "mul",
    dtype: torch.dtype = torch.float32,
    *,
    buffer: Callable = JitteredBuffer,
    grouped: bool = False,
    experts: int = EXPERTS,
    top_k: int = 2,
    **options: object,
) -> nn.ModuleList:
    """`build`, with a HybridEP dispatcher of these options in each layer."""
    model = build(layers, form, dtype, GroupedLayer if grouped else Layer, experts=experts, top_k=top_k)
    for number, layer in enumerate(model):
        layer.dispatcher = ac_moe.HybridEPDispatcher(experts, buffer=buffer, name=f"layers.{number}.moe", **options)
    return model


def checkpointed_as(kind: str, mode: str, *, pin_routing: bool = True) -> Forward:
    """Each layer in a checkpoint of its own, of one of `KINDS`."""

    def forward(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = in_checkpoint(layer, x, kind, mode, pin_routing=pin_routing)
        return x

    return forward


def in_checkpoint(block: Callable, x: torch.Tensor, kind: str, mode: str, *, pin_routing: bool = True) -> torch.Tensor:
    if kind == "reentrant":
        return checkpoint(ac_moe.wrap_reentrant(block, mode, pin_routing=pin_routing), x, use_reentrant=True)
    early_stop = kind == "early stop"
    if mode != "none":
        return recompute(block, x, mode, early_stop=early_stop)
    context_fn = ac_moe.context_fn("none", pin_routing=pin_routing)
    return checkpoint(block, x, use_reentrant=False, context_fn=context_fn, early_stop=early_stop)


@contextlib.contextmanager
def communication() -> Iterator[Counter]:
    """Counts the collectives by name."""
    calls = Counter[str]()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable:
        @functools.wraps(originals[name])
        def called(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return called

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
