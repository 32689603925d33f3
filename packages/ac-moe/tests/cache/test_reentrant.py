import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from ac_moe_local import (
    LocalLayer,
    direct,
    each,
    equal,
    gradients,
    inputs,
    layers,
    matrix_products,
    non_reentrant,
    reentrant,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import ac_moe
from ac_moe.cache.region import _threads

MODES = ("combine", "moe_tail")
by_reentry = functools.partial(checkpoint, use_reentrant=True)


def kept() -> tuple[int, int]:
    """Active regions on this thread, kept outputs."""
    return len(_threads.stack), ac_moe.stats().live_entries


@pytest.fixture(autouse=True)
def _nothing_is_left():
    gc.collect()
    ac_moe.reset_stats()
    assert kept() == (0, 0)
    yield
    gc.collect()
    assert kept() == (0, 0)


@pytest.fixture
def _no_collector():
    """Freed by the last reference, not by a collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["012", "210", "102"])
@pytest.mark.parametrize("wrapped", ["once", "for each call"])
def test_microbatches_in_flight(mode: str, order: str, wrapped: str) -> None:
    model, xs = layers(2), inputs(3)
    forward = each(reentrant(mode), model)
    if wrapped == "once":
        blocks = [ac_moe.wrap_reentrant(layer, mode) for layer in model]
        forward = each(by_reentry, blocks)
    assert equal(gradients(model, forward, xs, order), gradients(model, model, xs, order))
    stats = ac_moe.stats()
    assert (stats.stored, stats.served, stats.unserved, stats.live_entries) == (6, 6, 0, 0)
    assert stats.gemms_skipped == (6 if mode == "moe_tail" else 0)


@pytest.mark.parametrize("mode", MODES)
def test_backward_frees_each_block_when_it_has_run_though_the_loss_is_held(mode: str) -> None:
    model, (x,) = layers(3), inputs(1)
    live = []
    for layer in model:  # the first hook is on the first block: the last in the backward
        layer.register_forward_pre_hook(lambda *_: live.append(ac_moe.stats().live_entries))
    loss = each(reentrant(mode), model)(x.requires_grad_()).sum()
    loss.backward()
    assert live == [0, 1, 2, 3, 2, 1]
    assert ac_moe.stats().live_entries == 0
    assert loss.grad_fn is not None


def run_twice(model: nn.Module, forward: Callable, x: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = forward(x).square().sum()
    live = []
    for again in (True, True, False):
        loss.backward(retain_graph=again)
        live.append(ac_moe.stats().live_entries)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return [x.grad, *(parameter.grad.clone() for parameter in model.parameters())], live


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapped", ["once", "for each call"])
def test_retain_graph(mode: str, wrapped: str) -> None:
    model, (x,) = layers(2), inputs(1)
    forward = each(reentrant(mode), model)
    if wrapped == "once":
        forward = each(by_reentry, [ac_moe.wrap_reentrant(layer, mode) for layer in model])
    actual, live = run_twice(model, forward, x)
    assert live == [2, 2, 0]
    assert ac_moe.stats().served == 6
    assert equal(actual, run_twice(model, model, x)[0])


def test_nothing_is_kept_without_gradients() -> None:
    model, (x,) = layers(2), inputs(1)
    block = ac_moe.wrap_reentrant(model, "combine")
    with torch.no_grad():
        assert torch.equal(by_reentry(block, x.clone().requires_grad_()), model(x))
        assert torch.equal(block(x), model(x))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        by_reentry(block, x)
    assert ac_moe.stats().stored == 0


def test_a_checkpoint_without_reentry_is_told() -> None:
    layer, x = LocalLayer(), inputs(1)[0].requires_grad_()
    with pytest.warns(UserWarning, match=r"LocalLayer: .* not reentrant, .*'combine' is not applied"):
        checkpoint(ac_moe.wrap_reentrant(layer, "combine"), x, use_reentrant=False).sum().backward()
    assert ac_moe.stats().stored == 0


def test_outside_of_a_checkpoint_it_is_the_function() -> None:
    model, xs = layers(2), inputs(1)
    assert equal(gradients(model, ac_moe.wrap_reentrant(model, "moe_tail"), xs), gradients(model, model, xs))
    assert ac_moe.stats() == ac_moe.Stats()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("wrapped", ["once", "for each call"])
def test_a_backward_that_never_comes(wrapped: str) -> None:
    model, (x,) = layers(2), inputs(1)
    block = ac_moe.wrap_reentrant(model, "combine")
    y = by_reentry(block if wrapped == "once" else ac_moe.wrap_reentrant(model, "combine"), x.requires_grad_())
    assert kept() == (0, 2)
    del y
    assert kept() == (0, 0)


@pytest.mark.usefixtures("_no_collector")
def test_no_input_is_held_after_backward() -> None:
    model, (x,) = layers(1), inputs(1)
    block = ac_moe.wrap_reentrant(model, "moe_tail")
    x = x.requires_grad_() * 2  # saves nothing, so that the checkpoint alone holds it
    alive = weakref.ref(x)
    loss = by_reentry(block, x).sum()
    del x
    assert alive() is not None
    loss.backward()
    assert loss.grad_fn is not None
    assert alive() is None


class TripError(RuntimeError):
    pass


@pytest.mark.parametrize("phase", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_exceptions(mode: str, phase: int) -> None:
    model, xs = layers(2), inputs(1)
    calls = 0

    def block(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        x = model(x)
        if calls == phase:
            raise TripError
        return x

    held = None
    try:
        loss = by_reentry(ac_moe.wrap_reentrant(block, mode), xs[0].clone().requires_grad_()).sum()
        loss.backward()
    except TripError as error:
        held = error  # as a debugger or a logger would, with its traceback
    assert held is not None
    assert kept() == (0, {1: 0, 2: 2}[phase])  # a graph whose backward failed may be run again
    if phase == 2:
        loss.backward()
        assert kept() == (0, 0)
    forward = each(reentrant(mode), model)
    assert equal(gradients(model, forward, xs), gradients(model, model, xs))


@pytest.mark.parametrize("mode", MODES)
def test_a_part_without_gradients(mode: str) -> None:
    """Grad mode is off in all of the forward: which part has none is seen in the recompute alone."""
    model, xs = layers(1), inputs(2)

    def block(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            ahead = model(x)
        return model(x) * ahead.sigmoid()

    forward = functools.partial(reentrant(mode), block)
    assert equal(gradients(model, forward, xs, "10"), gradients(model, block, xs, "10"))
    stats = ac_moe.stats()
    assert (stats.stored, stats.served) == (4, 4)


@pytest.mark.parametrize("mode", MODES)
def test_what_an_outer_non_reentrant_checkpoint_keeps_of_an_inner_reentrant_one(mode: str) -> None:
    """The inner forward has gradients off, and counts as a call of the outer block all the same."""
    model, xs = layers(2), inputs(1)
    outer = non_reentrant(mode, early_stop=False)
    inside = each(reentrant(mode), model)
    actual = gradients(model, lambda x: outer(inside, x), xs)
    assert equal(actual, gradients(model, model, xs))
    stats = ac_moe.stats()
    # The recompute of the outer block, and the recomputes of the two inner ones.
    assert (stats.stored, stats.served) == (2, 4)


@pytest.mark.parametrize("wrapping", ["lambda", "partial"])
def test_a_function_around_the_wrapped_one(wrapping: str) -> None:
    model, xs = layers(2), inputs(1)
    block = ac_moe.wrap_reentrant(lambda x, scale: model(x) * scale, "combine")
    function = {"lambda": lambda x: block(x, scale=2), "partial": functools.partial(block, scale=2)}[wrapping]
    actual = gradients(model, functools.partial(by_reentry, function), xs)
    assert equal(actual, gradients(model, lambda x: model(x) * 2, xs))
    assert ac_moe.stats().served == 2


def test_two_wrapped_functions_in_one_checkpoint() -> None:
    model, xs = layers(2), inputs(1)
    blocks = [ac_moe.wrap_reentrant(layer, "moe_tail") for layer in model]
    actual = gradients(model, functools.partial(by_reentry, each(direct, blocks)), xs)
    assert equal(actual, gradients(model, model, xs))
    assert ac_moe.stats().gemms_skipped == 2


def test_called_twice_in_one_checkpoint() -> None:
    model, (x,) = layers(1), inputs(1)
    block = ac_moe.wrap_reentrant(model, "combine")
    with pytest.raises(ac_moe.RecomputeCacheError) as caught:
        by_reentry(lambda x: block(block(x)), x.requires_grad_())
    assert "it is called twice in one reentrant checkpoint" in str(caught.value)
    assert "checkpoint(ac_moe.wrap_reentrant(function, mode), ..., use_reentrant=True)" in str(caught.value)


class Other(torch.autograd.Function):
    """A reentrant checkpoint as Megatron-core and DeepSpeed have their own."""

    @staticmethod
    def forward(ctx, run_function, x):
        ctx.run_function = run_function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run_function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run_function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def test_another_reentrant_checkpoint() -> None:
    model, xs = layers(2), inputs(2)
    forward = each(lambda layer, x: Other.apply(ac_moe.wrap_reentrant(layer, "moe_tail"), x), model)
    assert equal(gradients(model, forward, xs, "10"), gradients(model, model, xs, "10"))
    assert ac_moe.stats().gemms_skipped == 4


def test_a_block_in_a_recompute_that_has_another_checkpoint_outside() -> None:
    """Evaluated under no_grad in the recompute of someone else's checkpoint, which keeps nothing for it."""
    model, xs = layers(1), inputs(1)
    block = ac_moe.wrap_reentrant(model, "combine")

    def outer(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                block(x)
        return model(x)

    assert equal(gradients(model, functools.partial(by_reentry, outer), xs), gradients(model, model, xs))
    assert ac_moe.stats().stored == 0


def test_backward_on_another_thread() -> None:
    model, (x,) = layers(2), inputs(1)
    expected = gradients(model, model, [x])
    model.zero_grad()
    loss = each(reentrant("moe_tail"), model)(x.requires_grad_()).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert ac_moe.stats().served == 2
    assert equal([x.grad, *(p.grad for p in model.parameters())], expected)


def test_routing_that_differs() -> None:
    """torch's reentrant checkpoint compares nothing: without a cache the gradients would be wrong in silence."""
    model, (x,) = layers(1), inputs(1)
    block = ac_moe.wrap_reentrant(model, "combine")
    y = by_reentry(block, x.requires_grad_())
    model[0].between = lambda rows: rows[:5]
    with pytest.raises(ac_moe.RecomputeRoutingMismatchError, match=r"rows \[7, 16\] .*, reversed\n.*rows \[5, 16\]"):
        y.sum().backward()


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_copies(copied: Callable) -> None:
    block = copied(ac_moe.wrap_reentrant(layers(2), "moe_tail"))
    xs = inputs(1)
    forward = functools.partial(by_reentry, block)
    assert equal(gradients(block.function, forward, xs), gradients(block.function, block.function, xs))
    assert ac_moe.stats().gemms_skipped == 2
    assert copied(ac_moe.wrap_reentrant(double, "combine")).__name__ == "double"


def test_modes() -> None:
    assert ac_moe.wrap_reentrant(double, "none") is double
    pinning = ac_moe.wrap_reentrant(layers(1), "none", pin_routing=True)
    with matrix_products():
        by_reentry(pinning, inputs(1)[0].requires_grad_()).sum().backward()
    assert ac_moe.stats() == ac_moe.Stats()
    with pytest.raises(ValueError, match="mode: 'tail' is not one of 'none', 'combine', 'moe_tail'"):
        ac_moe.wrap_reentrant(double, "tail")
    with pytest.raises(TypeError, match=r"function: None is not callable; give the block"):
        ac_moe.wrap_reentrant(None, "combine")


def test_compiled_blocks() -> None:
    model, xs = layers(2), inputs(1)
    blocks = [torch.compile(layer, backend="eager") for layer in model]
    expected = gradients(model, model, xs)
    assert equal(gradients(model, each(reentrant("moe_tail"), blocks), xs), expected)
    wrapped = torch.compile(ac_moe.wrap_reentrant(model, "moe_tail"), backend="eager")
    assert equal(gradients(model, functools.partial(by_reentry, wrapped), xs), expected)
    assert ac_moe.stats().gemms_skipped == 4


def test_layers_keep_what_they_are() -> None:
    assert isinstance(ac_moe.wrap_reentrant(layers(1)[0], "combine").function, LocalLayer)
