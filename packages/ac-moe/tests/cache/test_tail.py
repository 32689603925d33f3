"""Under moe_tail nothing but combine reads the output of a down projection, and who tries is told in the forward."""

import copy
from collections.abc import Callable

import pytest
import torch
from ac_moe_local import HIDDEN, WIDE, each, equal, gradients, inputs, layers, non_reentrant, reentrant
from torch.nn import functional as F

import ac_moe
from ac_moe.cache.region import Site, _threads


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, rows: torch.Tensor) -> torch.Tensor:
        return rows

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


READERS: dict[str, Callable[[torch.Tensor], object]] = {
    "a router weight after it": lambda rows: rows * torch.ones(7, 1),
    "a bias": lambda rows: rows + torch.ones(HIDDEN),
    "LoRA": lambda rows: torch.ones(7, WIDE) @ torch.ones(WIDE, HIDDEN) + rows,
    "in place": lambda rows: rows.mul_(2),
    "a cast": lambda rows: rows.bfloat16(),
    "a view": lambda rows: rows[:],
    "a copy": lambda rows: rows.clone(),
    "a detached alias": lambda rows: rows.detach() + 1,
    "data": lambda rows: rows.data,
    "a function": F.silu,
    "in a list": lambda rows: torch.cat([rows, rows]),
    "a statistic": lambda rows: rows.norm().item(),
    "an autograd.Function": Passed.apply,
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("where", ["between", "after"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [non_reentrant, reentrant])
def test_another_reader_is_refused_in_the_forward(make: Callable, reader: str, where: str) -> None:
    model, xs = layers(1), inputs(1)
    setattr(model[0], where, READERS[reader])
    with pytest.raises(ac_moe.MoETailError, match="moe_tail: `.*` reads the output of the down projection") as caught:
        each(make("moe_tail"), model)(xs[0].requires_grad_())
    assert len(caught.value.unmet) == 1
    assert _threads.stack == []
    assert ac_moe.stats().live_entries == 0


def test_the_refused_reader_is_named() -> None:
    model = layers(1)
    model[0].between = READERS["a bias"]
    with pytest.raises(ac_moe.MoETailError) as caught:
        non_reentrant("moe_tail")(model, inputs(1)[0].requires_grad_())
    assert str(caught.value) == (
        "moe_tail: `add` reads the output of the down projection, which the recompute does not make. Its only reader "
        "must be the dispatcher's combine: no bias or LoRA on it, no router weight after it, no cast, no statistics of "
        "it. Apply the router weight inside the activation, or use mode 'combine'."
    )


def test_combine_takes_nothing_else() -> None:
    model = layers(1)
    model[0].between = lambda rows: torch.zeros(rows.shape)
    model[0].site = Site("Layer", "layers.4.moe")
    with pytest.raises(ac_moe.MoETailError) as caught:
        non_reentrant("moe_tail")(model, inputs(1)[0].requires_grad_())
    assert str(caught.value).startswith(
        "layers.4.moe: moe_tail: the rows given to combine are not the very output of "
        "ac_moe.experts.down_projection, so the recompute cannot go without it."
    )


def test_what_reads_no_values_is_answered() -> None:
    model, xs = layers(2), inputs(1)
    expected = gradients(model, model, xs)
    told = []

    def look(rows: torch.Tensor) -> torch.Tensor:
        hooked = rows.register_hook(lambda grad: told.append(grad.shape))
        told.append((rows.shape, rows.size(0), len(rows), rows.dtype, rows.device, rows.requires_grad, rows.numel()))
        assert hooked is not None
        assert isinstance(rows, torch.Tensor)
        assert hash(rows) == id(rows)
        assert "grad_fn=<GroupedMmBackward0>" in f"{rows}"
        return rows

    for layer in model:
        layer.between = layer.after = look
    assert equal(gradients(model, each(non_reentrant("moe_tail"), model), xs), expected)
    assert len(told) == 12  # two looks in each layer and phase, of which four get a gradient


def test_a_detached_alias_is_for_combine_alone_too() -> None:
    """Nothing is refused that only holds on to it, and nothing is lost: combine takes it, without a gradient."""
    model, (x,) = layers(1), inputs(1)
    model[0].between = torch.Tensor.detach
    x.requires_grad_()
    (expected,) = torch.autograd.grad((model(x) * x).sum(), x)
    (actual,) = torch.autograd.grad((non_reentrant("moe_tail")(model, x) * x).sum(), x)
    assert torch.equal(actual, expected)


def test_without_gradients_or_another_mode_everything_may_be_read() -> None:
    model, (x,) = layers(1), inputs(1)
    model[0].between = READERS["a bias"]
    with torch.no_grad():
        non_reentrant("moe_tail")(model, x)
    forward, _ = ac_moe.context_fn("moe_tail")()
    with forward, torch.no_grad():
        model(x)
    with ac_moe.context_fn("combine")()[0]:
        model(x)


@pytest.mark.parametrize("reader", ["a router weight after it", "a bias", "a statistic", "a cast"])
@pytest.mark.parametrize("where", ["between", "after"])
def test_compiled_blocks_are_refused_alike(reader: str, where: str) -> None:
    model, xs = layers(1), inputs(1)
    compiled = torch.compile(model[0], backend="eager")
    run = non_reentrant("moe_tail")
    assert equal(gradients(model, lambda x: run(compiled, x), xs), gradients(model, model, xs))
    setattr(model[0], where, READERS[reader])
    with pytest.raises(ac_moe.MoETailError):
        run(compiled, xs[0].requires_grad_())
