"""A router that would decide otherwise in the recompute, pinned."""

import gc
from collections.abc import Callable

import pytest
import torch
from ac_moe_hybridep import KINDS, JitteredBuffer, build_hybridep, checkpointed_as, communication, in_checkpoint
from ac_moe_model import TOP_K, Layer, batches, build, differences, gradients, loss_of, plain, same_bits
from ac_moe_ranks import Ranks
from torch import nn

import ac_moe
from ac_moe.cache.region import Site
from ac_moe.routing import pin, site_of
from ac_moe.routing.pins import is_pinned

# ---- on ranks: bitwise equal to no checkpointing


class Unstable(Layer):
    """Adds noise to its logits that no checkpoint replays, and whose scale makes near-ties of them.

    The n-th call since `calls` was reset gets the n-th noise: forwards get the same with and without checkpointing as
    long as all of them come before the first recompute.
    """

    noise, pinned, calls = "", "", 0

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        logits = nn.functional.linear(x, self.router).float()
        if self.noise == "near-tie":
            logits = logits * 1e-6
        logits = logits + torch.randn(logits.shape, generator=generator) * (1 if self.noise == "noise" else 1e-6)
        if "logits" in self.pinned:
            logits = pin(site_of(self), logits)
        weights, ids = torch.softmax(logits, -1).topk(TOP_K, -1)
        if "ids" in self.pinned:
            ids = pin(site_of(self), ids)
            weights = torch.softmax(logits, -1).gather(-1, ids)
        return ids, weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin()


class Skipping(Unstable):
    """Experts in a loop that passes over those without tokens: what it saves depends on the routing."""

    def mixture(self, x: torch.Tensor) -> torch.Tensor:
        sent = self.dispatcher.dispatch(x, *self.route(x))
        blocks = [sent.rows[:0]]
        for expert, (rows, weight) in enumerate(
            zip(sent.rows.split(sent.splits), sent.weights.split(sent.splits), strict=True)
        ):
            if len(rows):
                inner = nn.functional.silu(rows @ self.gate[expert]) * (rows @ self.up[expert]) * weight[:, None]
                blocks.append(inner @ self.down[expert])
        return self.dispatcher.combine(torch.cat(blocks), sent)


def unstable(dispatcher: str, noise: str, pinned: str, layer_class: type = Unstable) -> nn.ModuleList:
    options = {"experts": 8, "top_k": TOP_K}
    model = build_hybridep(2, **options) if dispatcher == "hybridep" else build(2, **options)
    for layer in model:
        layer.__class__, layer.noise, layer.pinned = layer_class, noise, pinned
    return model


def pinned_routing(rank: int, *, dispatcher: str, noise: str, kind: str, mode: str, skipping: bool) -> list[str]:
    # Few tokens where experts are to have none.
    inputs = batches(2, tokens=(2, 1)) if skipping else batches(2)
    model = unstable(dispatcher, noise, "logits", Skipping if skipping else Unstable)
    schedule = "f0 f1 b0 b1"
    JitteredBuffer.restart()
    actual = gradients(model, inputs, checkpointed_as(kind, mode), schedule)
    assert ac_moe.stats().live_pinned == 0
    JitteredBuffer.restart()
    return differences(actual, gradients(model, inputs, plain, schedule))


@pytest.mark.parametrize("mode", ["none", "combine"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", ["noise", "near-tie"])
@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep"])
def test_an_unstable_router_is_exact(ranks: Ranks, dispatcher: str, noise: str, kind: str, mode: str) -> None:
    case = {"dispatcher": dispatcher, "noise": noise, "kind": kind, "mode": mode, "skipping": False}
    assert ranks.run(pinned_routing, **case) == [[], []]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep"])
def test_a_loop_over_the_experts_that_have_tokens(ranks: Ranks, dispatcher: str, kind: str) -> None:
    case = {"dispatcher": dispatcher, "noise": "noise", "kind": kind, "mode": "combine", "skipping": True}
    assert ranks.run(pinned_routing, **case) == [[], []]


def unpinned(rank: int, dispatcher: str, kind: str) -> tuple[str, tuple[int, ...]]:
    model, (x,) = unstable(dispatcher, "noise", "", Skipping), batches(1)
    loss = loss_of(checkpointed_as(kind, "combine")(model, x))
    with pytest.raises(ac_moe.RecomputeRoutingMismatchError) as caught:
        loss.backward()
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep"])
def test_without_the_pin_it_is_an_error(ranks: Ranks, dispatcher: str, kind: str) -> None:
    for text, differing in ranks.run(unpinned, dispatcher=dispatcher, kind=kind):
        assert "ac_moe.routing.pin" in text
        assert differing == (0, 1)


def agreeing(rank: int, pinned: str) -> dict[str, int]:
    model, (x,) = unstable("hybridep", "", pinned), batches(1)
    loss = loss_of(checkpointed_as("to the end", "combine")(model, x))
    with communication() as calls:
        loss.backward()
    return {"all_reduce": calls["all_reduce"]}


def test_pinned_ids_need_no_agreement(ranks: Ranks) -> None:
    """Ids that are the forward's own cannot differ; ids that were computed from pinned logits might."""
    assert ranks.run(agreeing, pinned="logits ids") == [{"all_reduce": 0}] * 2
    assert ranks.run(agreeing, pinned="logits") == [{"all_reduce": 2}] * 2


# ---- alone


class Drifts(nn.Module):
    """Adds a number to its parameter that is another one in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.runs = 0
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        value = pin(site_of(self), self.weight * x + self.runs)
        count = pin(site_of(self), torch.tensor([self.runs]))
        self.seen.append(torch.cat([value.detach(), count]))
        value /= value.sum()  # routers normalise in place
        return (value * count).sin()


def run(kind: str | None, mode: str = "none", *, pin_routing: bool = True) -> tuple[Drifts, torch.Tensor]:
    block, x = Drifts(), torch.tensor([0.5, 1.5, 2.5], requires_grad=True)
    y = block(x) if kind is None else in_checkpoint(block, x, kind, mode, pin_routing=pin_routing)
    loss_of(y).backward()
    return block, x.grad


@pytest.mark.parametrize("mode", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("kind", KINDS)
def test_value_of_the_forward_and_gradient_of_the_recompute(kind: str, mode: str) -> None:
    expected, grad = run(None)
    block, actual = run(kind, mode)
    assert block.runs == 2
    assert same_bits(*block.seen)
    assert same_bits(actual, grad)
    assert same_bits(block.weight.grad, expected.weight.grad)
    assert ac_moe.stats().live_pinned == 0


def test_without_a_context_nothing_is_pinned() -> None:
    x = torch.ones(2)
    assert pin(Site("router"), x) is x
    block, _ = run("early stop", "none", pin_routing=False)
    assert not torch.equal(*block.seen)


def test_what_is_served_is_known_until_it_changes() -> None:
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        ids = pin(site, x.detach().long())
        seen.append((is_pinned(ids), is_pinned(ids.clone())))
        ids += 1
        seen.append((is_pinned(ids), False))
        return (x * ids).sin().sin()

    site = Site("router")
    in_checkpoint(block, torch.ones(2, requires_grad=True), "to the end", "combine").sum().backward()
    assert seen == [(False, False), (False, False), (True, False), (False, False)]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_pins_of_a_part_without_gradients(kind: str, without: Callable) -> None:
    site, seen = Site("Router"), []

    def block(x: torch.Tensor) -> torch.Tensor:
        with without():
            ids = pin(site, torch.arange(2) + len(seen))
            assert not is_pinned(torch.arange(2))
        seen.append(ids.tolist())
        return x.sin()

    in_checkpoint(block, torch.ones(2, requires_grad=True), kind, "combine").sum().backward()
    assert seen == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [("shape", "pins torch.float32 [3] where the forward pinned torch.float32 [2]"), ("edited", "changed in place")],
)
def test_what_cannot_be_served(changed: str, message: str) -> None:
    runs = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(0)
        y = torch.cat([x, x[:1]]) if changed == "shape" and len(runs) == 2 else x * 1
        z = pin(site, y).sum()
        if changed == "edited":
            with torch.no_grad():
                y.add_(1)
        return (x * z).sin()

    site = Site("Router", "layers.0.router")
    loss = in_checkpoint(block, torch.ones(2, requires_grad=True), "to the end", "combine").sum()
    with pytest.raises(ac_moe.RecomputeCacheError) as caught:
        loss.backward()
    text = str(caught.value)
    assert text.startswith("layers.0.router: ")
    assert message in text
    del loss, caught
    gc.collect()
    assert ac_moe.stats().live_pinned == 0
