"""What goes wrong says so, and leaves nothing behind: the next step is exact."""

import functools
import gc
import threading

import pytest
import torch
from ac_moe_hybridep import KINDS, in_checkpoint
from ac_moe_model import EXPERTS, Layer, batches, build, checkpointed, differences, gradients, loss_of, plain, recompute
from ac_moe_ranks import Ranks
from torch import nn
from torch.utils.checkpoint import CheckpointError

import ac_moe
from ac_moe.cache.region import _threads


def left_behind() -> tuple[int, int]:
    """Active regions on this thread, kept outputs.

    To be asked after a `next_step` if a backward failed: PyTorch leaves the nodes that were ready to run in the
    thread's queue, where they hold their graph, until the next backward passes over them.
    """
    return len(_threads.stack), ac_moe.stats().live_entries


def next_step(model: nn.ModuleList) -> list[str]:
    inputs = batches(1)
    return differences(gradients(model, inputs, checkpointed("combine")), gradients(model, inputs, plain))


class TripError(RuntimeError):
    pass


def fails(model: nn.ModuleList, x: torch.Tensor, phase: str) -> torch.Tensor:
    """Two layers in one checkpoint, with a failure after the second one's combine."""
    calls = 0

    def block(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        x = plain(model, x)
        if calls == (1 if phase == "forward" else 2):
            raise TripError
        return x.sin().sin()

    return recompute(block, x, "combine")


def failing(rank: int, phase: str) -> tuple[tuple[int, int], tuple[int, int], list[str]]:
    model, (x,) = build(2), batches(1)
    loss = None
    try:
        loss = loss_of(fails(model, x, phase))
        loss.backward()
    except TripError as error:
        held = error  # as a debugger or a logger would, with its traceback
    now = left_behind()
    del held, loss
    gc.collect()
    differing = next_step(model)
    return now, left_behind(), differing


@pytest.mark.parametrize("phase", ["forward", "recompute"])
def test_exception(ranks: Ranks, phase: str) -> None:
    # A graph whose backward failed may be run again; it keeps its outputs as long as it lives.
    live = {"forward": 0, "recompute": 2}[phase]
    assert ranks.run(failing, phase=phase) == [((0, live), (0, 0), [])] * 2


def out_of_order(rank: int) -> tuple[tuple[int, int], list[str]]:
    """torch before 2.13 leaves the context of a failed forward late: after others were entered, on any thread."""
    forward, recompute_context = ac_moe.context_fn("combine")()
    forward.__enter__()
    model = build(2)
    differing = next_step(model)
    thread = threading.Thread(target=forward.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    del forward, recompute_context
    return left_behind(), differing


def test_a_context_left_late_on_another_thread(ranks: Ranks) -> None:
    assert ranks.run(out_of_order) == [((0, 0), [])] * 2


def without_grad(rank: int) -> tuple[int, bool]:
    model, (x,) = build(2), batches(1)
    ac_moe.reset_stats()
    with torch.no_grad():
        y = checkpointed("combine")(model, x)
    return ac_moe.stats().stored, torch.equal(y, plain(model, x))


def test_nothing_is_kept_without_grad(ranks: Ranks) -> None:
    assert ranks.run(without_grad) == [(0, True)] * 2


def partly_without_grad(rank: int) -> tuple[list[str], ac_moe.Stats]:
    """A block that calls its layer under no_grad first, such as a look-ahead."""

    def block(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            ahead = layer(x)
        return layer(x) * ahead.sigmoid()

    def forward(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return recompute(functools.partial(block, model[0]), x, "combine")

    model, inputs = build(1), batches(1)
    ac_moe.reset_stats()
    actual = gradients(model, inputs, forward)
    stats = ac_moe.stats()
    return differences(actual, gradients(model, inputs, lambda model, x: block(model[0], x))), stats


def test_a_part_without_grad_is_computed_again(ranks: Ranks) -> None:
    for differing, stats in ranks.run(partly_without_grad):
        assert differing == []
        assert (stats.stored, stats.served, stats.live_entries) == (1, 1, 0)


def edited(rank: int, where: str) -> tuple[str, tuple[int, int], list[str]]:
    model, (x,) = build(1), batches(1)

    def block(x: torch.Tensor) -> torch.Tensor:
        y = model[0].mixture(x)
        if where == "inside":
            y += 1
        return (y * model[0].scale).sin() if where == "inside" else y

    y = recompute(block, x, "combine", early_stop=False)
    if where == "after":
        with torch.no_grad():
            y.mul_(2)
    with pytest.raises(ac_moe.RecomputeCacheError) as caught:
        loss_of(y).backward()
    text = str(caught.value)
    del caught, y
    gc.collect()
    differing = next_step(model)
    return text, left_behind(), differing


@pytest.mark.parametrize("where", ["inside", "after"])
def test_output_edited_in_place(ranks: Ranks, where: str) -> None:
    for text, left, differing in ranks.run(edited, where=where):
        assert "AllToAllDispatcher #" in text
        assert "was changed in place" in text
        assert "`y = y + x` for `y += x`" in text
        assert left == (0, 0)
        assert differing == []


class Drifting(Layer):
    """Routes otherwise in the recompute: with other counts, or with the same counts and two tokens exchanged."""

    def __init__(self, drift: str) -> None:
        super().__init__("add", top_k=1)
        self.drift, self.calls = drift, 0
        self.dispatcher = ac_moe.AllToAllDispatcher(EXPERTS, name="layers.3.moe")

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        _, weights = super().route(x)
        ids = (torch.arange(x.shape[0]) % EXPERTS)[:, None]
        if self.calls % 2 == 0 and self.drift == "counts":
            ids = torch.zeros_like(ids)
        if self.calls % 2 == 0 and torch.distributed.get_rank() == 0:
            if self.drift == "exchanged":
                ids[[0, 1]] = ids[[1, 0]]
            if self.drift == "counts of rank 0":  # among the experts of rank 0, so that rank 1 gets the same rows
                ids[ids == 1] = 0
        return ids, weights


def drifting(rank: int, drift: str, kind: str, mode: str) -> dict[str, object]:
    torch.manual_seed(rank)
    layer, (x,) = Drifting(drift), batches(1)
    y = in_checkpoint(layer, x, kind, mode)
    with pytest.raises(ac_moe.RecomputeRoutingMismatchError) as caught:
        loss_of(y).backward()
    error = caught.value
    result = {
        "site": error.site,
        "text": str(error),
        "ranks": error.ranks,
        "differ": error.forward != error.recompute,
        "counts": error.forward.tokens_per_expert == error.recompute.tokens_per_expert,
        "is torch's": isinstance(error, CheckpointError),
    }
    del caught, error, y
    gc.collect()
    return result | {"next": next_step(build(2)), "left": left_behind()}


@pytest.mark.parametrize("mode", ["none", "combine"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drift", ["counts", "counts of rank 0", "exchanged"])
def test_routing_that_differs_in_the_recompute(ranks: Ranks, drift: str, kind: str, mode: str) -> None:
    """Raised on both ranks alike, even if only rank 0 routes otherwise: none waits for the other.

    Also where early stop ends the recompute before the combine.
    """
    for rank, result in enumerate(ranks.run(drifting, drift=drift, kind=kind, mode=mode)):
        text = result.pop("text")
        assert text.startswith("layers.3.moe: tokens are routed differently in the recompute than in the forward")
        assert "forward:   5 tokens" in text or "forward:   8 tokens" in text
        assert "recompute: 5 tokens" in text or "recompute: 8 tokens" in text
        assert result == {
            "site": "layers.3.moe",
            "ranks": (0, 1) if drift == "counts" else (0,),
            "differ": True,
            "counts": drift == "exchanged" or (drift == "counts of rank 0" and rank == 1),
            "is torch's": True,
            "left": (0, 0),
            "next": [],
        }


def on_a_thread(rank: int) -> tuple[list[str], int]:
    def forward(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return checkpointed("combine")(model, x)

    model, (x,) = build(2), batches(1)
    ac_moe.reset_stats()
    loss = loss_of(forward(model, x))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    served = ac_moe.stats().served
    actual = {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}
    expected = gradients(model, [x.detach().requires_grad_()], plain)
    expected["x"] = expected.pop("input 0")
    expected.pop("loss 0")
    return differences(actual, expected), served


def test_backward_on_another_thread(ranks: Ranks) -> None:
    assert ranks.run(on_a_thread) == [([], 2)] * 2


def backward_inside(rank: int, early_stop: bool, nested: bool) -> tuple[list[str], tuple[int, int]]:
    """A block that takes a gradient of its own between two layers: a recompute within the forward.

    Nested: in the recompute of the block, the graph of the inner checkpoint made there is the one that runs.
    """

    def block(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = recompute(model[0], x, "combine", early_stop=early_stop) if nested else model[0](x)
        (g,) = torch.autograd.grad(y.sin().sum(), x, retain_graph=True)
        return model[1](y + g.detach())

    def forward(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return recompute(functools.partial(block, model), x * 1, "combine", early_stop=early_stop)

    model, inputs = build(2), batches(1)
    actual = gradients(model, inputs, forward)
    left = left_behind()
    return differences(actual, gradients(model, inputs, lambda model, x: block(model, x * 1))), left


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_backward_inside_a_block(ranks: Ranks, early_stop: bool, nested: bool) -> None:
    assert ranks.run(backward_inside, early_stop=early_stop, nested=nested) == [([], (0, 0))] * 2
