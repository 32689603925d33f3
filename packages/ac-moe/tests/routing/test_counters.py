"""Counters of routers, as Megatron-core's and those of Hugging Face's models and others keep them."""

import functools
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from ac_moe_hybridep import KINDS, SCHEDULES, in_checkpoint
from ac_moe_model import differences, loss_of
from torch import nn

import ac_moe
from ac_moe.routing import counted_once

EXPERTS, HIDDEN = 4, 6
ATTRIBUTES = ("load", "steps", "aux_losses", "by_name", "made_later", "aux_total")
LOG: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)


class Router(nn.Module):
    """Every kind of state, and an output and gradients that depend on what each of them is when it runs."""

    steps = 0  # of the class, until the first step

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS), persistent=False)
        self.register_buffer("lazy", None, persistent=False)
        self.load: torch.Tensor | None = None
        self.aux_losses: list[torch.Tensor] = []
        self.by_name: dict[str, list[int]] = {"calls": []}
        self.aux_total = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(x @ self.weight.t())
        counts = torch.zeros(EXPERTS).index_add_(0, (scores + self.expert_bias).argmax(-1), torch.ones(len(x)))
        self.tokens_per_expert += counts
        self.expert_bias = self.expert_bias + 0.25 * (counts.mean() - counts).sign()
        self.steps += 1
        self.load = counts if self.load is None else self.load + counts
        if self.lazy is None:
            self.lazy = counts * 1
        else:
            self.lazy.add_(counts)
        if not hasattr(self, "made_later"):
            self.made_later = 10
        self.made_later += 1
        aux = (scores.mean(0) * self.tokens_per_expert.clone() / self.steps).sum()
        self.aux_total = self.aux_total.detach() + aux
        self.aux_losses.append(aux.detach())
        self.by_name["calls"].append(len(self.aux_losses))
        LOG["aux"]["values"] = LOG["aux"].get("values", torch.zeros(2)) + aux.detach()
        factor = self.load.sum() + self.lazy.sum() + self.made_later + len(self.by_name["calls"])
        factor = (factor + LOG["aux"]["values"].sum()).log()
        return (scores * self.expert_bias.cos() * factor).mean(-1, keepdim=True) + aux * 0.01


class Block(nn.Module):
    def __init__(self, *, counted: bool = True) -> None:
        super().__init__()
        self.router = Router()
        self.counted = counted
        self.scale = nn.Parameter(torch.linspace(0.5, 1, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.counted:
            return (x + self.router(x) * self.scale).tanh()
        with counted_once(self.router, ATTRIBUTES, [LOG]):
            weight = self.router(x)
        return (x + weight * self.scale).tanh()


def state(router: Router) -> dict[str, object]:
    """All of it, in plain numbers."""
    tensors = [*router.buffers(), router.load, router.aux_total, *router.aux_losses, LOG["aux"]["values"]]
    return {
        "tensors": [tensor.tolist() for tensor in tensors],
        "numbers": [router.steps, router.made_later, router.by_name],
        "places": sorted(router._buffers),
    }


def train(kind: str | None, mode: str, schedule: str, *, counted: bool = True) -> tuple[dict, dict]:
    """Gradients of four microbatches and the state after them; two layers in one checkpoint."""
    LOG.clear()
    model = nn.ModuleList(Block(counted=counted) for _ in range(2))
    inputs = [torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(4)]
    losses = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model[1](model[0](x))

    for step in schedule.split():
        number = int(step[1:])
        if step[0] == "f":
            x = inputs[number]
            losses[number] = loss_of(forward(x) if kind is None else in_checkpoint(forward, x, kind, mode))
        else:
            losses.pop(number).backward()
    found = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return found, {name: state(block.router) for name, block in model.named_children()}


@functools.cache
def without_checkpointing(schedule: str) -> tuple[dict, dict]:
    return train(None, "none", schedule)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("mode", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_and_gradients_are_those_without_checkpointing(kind: str, mode: str, name: str) -> None:
    gradients, seen = train(kind, mode, SCHEDULES[name])
    expected, wanted = without_checkpointing(SCHEDULES[name])
    assert seen == wanted
    assert differences(gradients, expected) == []
    assert ac_moe.stats().live_pinned == 0


@pytest.mark.parametrize("kind", KINDS)
def test_without_it_the_state_is_counted_twice(kind: str) -> None:
    """The router of these tests does what they are about."""
    schedule = "f0 b0"
    gradients, seen = train(kind, "combine", schedule, counted=False)
    expected, wanted = without_checkpointing(schedule)
    assert seen["0"]["numbers"] == [2, 12, {"calls": [1, 2]}] != wanted["0"]["numbers"]
    assert differences(gradients, expected) != []


def loss(kind: str = "early stop") -> tuple[Block, torch.Tensor]:
    LOG.clear()
    block = Block()
    return block, loss_of(in_checkpoint(block, torch.randn(5, HIDDEN, requires_grad=True), kind, "combine"))


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_went_on_stays(kind: str) -> None:
    """Counters that are reset, and a bias that is updated, between the forward and its backward."""
    block, value = loss(kind)
    router = block.router
    router.tokens_per_expert.zero_()
    router.expert_bias, router.load, router.steps = torch.full((EXPERTS,), 7.0), None, 100
    objects = dict(router._buffers)
    value.backward()
    assert router.tokens_per_expert.tolist() == [0.0] * EXPERTS
    assert router.expert_bias.tolist() == [7.0] * EXPERTS
    assert (router.load, router.steps) == (None, 100)
    assert all(router._buffers[name] is tensor for name, tensor in objects.items())


def test_an_error_in_the_recompute_leaves_the_state() -> None:
    block, value = loss()
    before = state(block.router)
    block.router.forward = None  # not callable
    with pytest.raises(TypeError):
        value.backward()
    del block.router.forward, value
    assert state(block.router) == before
    block.router.aux_total = None  # holds the graph, which holds the block
    gc.collect()
    assert ac_moe.stats().live_pinned == 0


def test_retain_graph() -> None:
    block, value = loss()
    before = state(block.router)
    value.backward(retain_graph=True)
    first = block.router.weight.grad.clone()
    value.backward()
    assert state(block.router) == before
    assert torch.equal(block.router.weight.grad, 2 * first)


@pytest.mark.parametrize("kind", KINDS)
def test_nested_checkpoints(kind: str) -> None:
    def train(nested: bool) -> tuple[dict, dict]:
        LOG.clear()
        block, x = Block(), torch.linspace(-1, 1, 5 * HIDDEN).view(5, HIDDEN).requires_grad_()

        def inside(x: torch.Tensor) -> torch.Tensor:
            return in_checkpoint(block, x, kind, "combine")

        loss_of(in_checkpoint(inside, x, kind, "combine") if nested else block(x)).backward()
        return {"x": x.grad} | {name: p.grad for name, p in block.named_parameters()}, state(block.router)

    gradients, seen = train(True)
    expected, wanted = train(False)
    assert seen == wanted
    assert differences(gradients, expected) == []


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_counters_that_are_updated_without_gradients(kind: str, without: Callable) -> None:
    router = nn.Linear(HIDDEN, EXPERTS)
    router.register_buffer("load", torch.zeros(EXPERTS))
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        scores = router(x)
        with without(), counted_once(router, "steps"):
            router.load += torch.bincount(scores.argmax(-1), minlength=EXPERTS)
            router.steps += 1
            seen.append((router.load.tolist(), router.steps))
        return scores.sin()

    router.steps = 0
    in_checkpoint(block, torch.randn(5, HIDDEN, requires_grad=True), kind, "combine").sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1] == (router.load.tolist(), router.steps)


def test_outside_of_a_context_it_does_nothing() -> None:
    LOG.clear()
    ac_moe.reset_stats()
    block, x = Block(), torch.randn(5, HIDDEN)
    block(x)
    with torch.no_grad():
        in_checkpoint(block, x, "early stop", "combine")
    assert block.router.steps == 2
    assert ac_moe.stats().pinned == 0


def test_what_is_kept_holds_no_graph() -> None:
    """An accumulator with a graph: keeping it as it is would keep every step of a loop without a backward."""
    LOG.clear()
    block = Block()
    seen = []
    for _ in range(3):
        x = torch.randn(5, HIDDEN, requires_grad=True) * 1
        seen.append(weakref.ref(x))
        in_checkpoint(block, x, "early stop", "combine")
    del x
    gc.collect()
    assert [reference() is not None for reference in seen] == [False, False, True]
    block.router.aux_total = None  # holds the last step's graph, which holds the block
    gc.collect()
    assert ac_moe.stats().live_pinned == 0


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(1))
        self.group = object()

    @property
    def shown(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("shown", ValueError, "attributes: 'shown' of Odd is a property; name the attribute that it is stored in"),
        ("trained", ValueError, "attributes: 'trained' of Odd is a parameter that is trained"),
        ("group", TypeError, "attributes: 'group' of Odd is a object; only numbers"),
        ("misspelt", AttributeError, "attributes: no part of Odd has 'misspelt'"),
    ],
)
def test_mistakes(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught, counted_once(Odd(), name):
        pass
    assert str(caught.value).startswith(message)
