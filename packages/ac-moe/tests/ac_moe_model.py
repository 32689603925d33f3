"""A small expert-parallel model, its dense reference, and the runs that the tests compare."""

import contextlib
import copy
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ac_moe

HIDDEN, WIDE, EXPERTS, TOP_K = 16, 24, 4, 2
TOKENS = (5, 8)  # on rank 0 and rank 1


DISPATCHERS: dict[str, Callable] = {
    "alltoall": ac_moe.AllToAllDispatcher,
    "hybridep": functools.partial(ac_moe.HybridEPDispatcher, buffer=ac_moe.reference.HybridEPBuffer),
}


class Layer(nn.Module):
    """One MoE layer with its residual: form `add` saves nothing after the combine, form `mul` saves its output."""

    def __init__(
        self, form: str = "mul", *, experts: int = EXPERTS, top_k: int = TOP_K, dispatcher: str = "alltoall"
    ) -> None:
        super().__init__()
        self.form, self.top_k = form, top_k
        self.dispatcher = DISPATCHERS[dispatcher](experts)
        local = len(self.dispatcher.local_experts)
        self.router = nn.Parameter(torch.randn(experts, HIDDEN))
        self.scale = nn.Parameter(torch.randn(HIDDEN))
        self.gate = nn.Parameter(torch.randn(local, HIDDEN, WIDE) * 0.2)
        self.up = nn.Parameter(torch.randn(local, HIDDEN, WIDE) * 0.2)
        self.down = nn.Parameter(torch.randn(local, WIDE, HIDDEN) * 0.2)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax(nn.functional.linear(x, self.router).float(), -1)
        weights, ids = scores.topk(self.top_k, -1)
        return ids, weights

    def mixture(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.route(x)
        sent = self.dispatcher.dispatch(x, ids, weights)
        blocks = []
        for expert, (rows, weight) in enumerate(
            zip(sent.rows.split(sent.splits), sent.weights.split(sent.splits), strict=True)
        ):
            inner = nn.functional.silu(rows @ self.gate[expert]) * (rows @ self.up[expert]) * weight[:, None]
            blocks.append(inner.to(rows.dtype) @ self.down[expert])
        return self.dispatcher.combine(torch.cat(blocks), sent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mixture(x)
        return x + y if self.form == "add" else x + y * self.scale


class GroupedLayer(Layer):
    """The same with `experts: torch_mm`: what `moe_tail` needs."""

    def mixture(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.route(x)
        sent = self.dispatcher.dispatch(x, ids, weights)
        offsets = sent.tokens_per_expert.cumsum(0).int()
        gate = ac_moe.experts.grouped_mm(sent.rows, self.gate, offsets)
        up = ac_moe.experts.grouped_mm(sent.rows, self.up, offsets)
        inner = (nn.functional.silu(gate) * up * sent.weights[:, None]).to(sent.rows.dtype)
        return self.dispatcher.combine(ac_moe.experts.down_projection(inner, self.down, offsets), sent)


def stats_at_rest() -> ac_moe.Stats:
    """What is counted once nothing is live any more, or after two seconds if something stays.

    A thread of gloo's may hold a collective's tensors for a moment after it is done, and these may hold their graph.
    """
    deadline = time.monotonic() + 2
    while True:
        stats = ac_moe.stats()
        if not (stats.live_entries or stats.live_pinned) or time.monotonic() > deadline:
            return stats
        time.sleep(0.001)


def build(
    layers: int = 3, form: str = "mul", dtype: torch.dtype = torch.float32, kind: type[Layer] = Layer, **options: object
) -> nn.ModuleList:
    """The same model on every call; router and scale are alike on all ranks, experts are not."""
    torch.manual_seed(7)
    model = nn.ModuleList(kind(form, **options) for _ in range(layers))
    torch.manual_seed(100 + dist.get_rank())
    for layer in model:
        for weight in (layer.gate, layer.up, layer.down):
            nn.init.normal_(weight, std=0.2)
    return model.to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float32, tokens: tuple[int, ...] = TOKENS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    rows = tokens[dist.get_rank()]
    return [torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_() for _ in range(count)]


Forward = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


def plain(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = layer(x)
    return x


def checkpointed(mode: str, **options: object) -> Forward:
    """Each layer in a checkpoint of its own."""

    def forward(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = recompute(layer, x, mode, **options)
        return x

    return forward


def checkpointed_as_one(mode: str, **options: object) -> Forward:
    """All layers in one checkpoint."""
    return lambda model, x: recompute(functools.partial(plain, model), x, mode, **options)


def recompute(block: Callable, x: torch.Tensor, mode: str, *, inner: Callable | None = None, **options: object):
    return checkpoint(block, x, use_reentrant=False, context_fn=ac_moe.context_fn(mode, inner=inner), **options)


# How a block is checkpointed: (block, input, mode) -> output.
KINDS: dict[str, Callable] = {
    "early stop": recompute,
    "to the end": functools.partial(recompute, early_stop=False),
    "reentrant": lambda block, x, mode: checkpoint(ac_moe.wrap_reentrant(block, mode), x, use_reentrant=True),
}


def checkpointed_by(kind: str, mode: str) -> Forward:
    """Each layer in a checkpoint of its own, of one of `KINDS`; without any for `kind == "off"`."""

    def forward(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = layer(x) if kind == "off" else KINDS[kind](layer, x, mode)
        return x

    return forward


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y.float() ** 2).sum()


def gradients(
    model: nn.ModuleList, inputs: list[torch.Tensor], forward: Forward, schedule: str | None = None
) -> dict[str, torch.Tensor]:
    """Losses, and gradients of inputs and of every parameter, from fresh copies of `model` and `inputs`."""
    model = copy.deepcopy(model)
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    steps = (schedule or " ".join(f"f{i} b{i}" for i in range(len(inputs)))).split()
    losses: dict[int, torch.Tensor] = {}
    result = {}
    for step in steps:
        number = int(step[1:])
        if step[0] == "f":
            losses[number] = loss_of(forward(model, inputs[number]))
        else:
            result[f"loss {number}"] = losses[number].detach()
            losses.pop(number).backward()
    result |= {f"input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad}
    result |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return result


def differences(actual: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> list[str]:
    """Names whose bits differ; a gradient that is missing on one side only differs."""
    assert actual.keys() == expected.keys()
    assert expected, "nothing to compare"
    names = []
    for name, wanted in expected.items():
        got = actual[name]
        if (got is None) != (wanted is None) or (got is not None and not same_bits(got, wanted)):
            names.append(name)
    return names


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def live_tensors() -> list[torch.Tensor]:
    """Of this job, once their number stays: gloo's threads let go of a collective's a moment after it is done."""

    def living() -> list[torch.Tensor]:
        return [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]

    number, seen = -1, 0
    while seen < 10:
        time.sleep(0.005)
        now = len(living())
        number, seen = now, seen + 1 if now == number else 0
    return living()


def storage_bytes() -> int:
    storages = (tensor.untyped_storage() for tensor in live_tensors())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclasses.dataclass
class Count:
    value: int = 0


@contextlib.contextmanager
def collectives() -> Iterator[Count]:
    """Counts the calls of `all_to_all_single`, the only collective of the dispatcher."""
    count, original = Count(), dist.all_to_all_single

    @functools.wraps(original)
    def counting(*args: object, **kwargs: object) -> object:
        count.value += 1
        return original(*args, **kwargs)

    dist.all_to_all_single = counting
    try:
        yield count
    finally:
        dist.all_to_all_single = original
