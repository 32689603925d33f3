"""The promise: whatever the checkpoint, the order of microbatches, the dtype and the mode, gradients are bit for bit
those without checkpointing, and what is skipped and kept is exactly what was announced.

Every test runs many combinations in one job of the ranks. A dispatcher is one more of `DISPATCHERS`, a way of
checkpointing one more of `KINDS`, in `ac_moe_model.py`.
"""

import functools
import gc
import itertools
import weakref

import pytest
import torch
from ac_moe_hybridep import checkpointed_as
from ac_moe_model import (
    DISPATCHERS,
    HIDDEN,
    KINDS,
    TOKENS,
    GroupedLayer,
    batches,
    build,
    checkpointed_by,
    collectives,
    differences,
    live_tensors,
    loss_of,
    stats_at_rest,
    storage_bytes,
)
from ac_moe_ranks import Ranks
from torch.profiler import ProfilerActivity, profile

import ac_moe

MODES = ("none", "combine", "moe_tail")
FORMS = ("add", "mul")
LAYERS = 2
LOCAL_EXPERTS = 2

# Forwards and backwards of microbatches, as pipeline schedules order them: as many as an order needs to show, because
# the time of these tests is that of collectives. Interleaved: the model is cut into two stages of one rank (f21 is the
# forward of microbatch 2 in stage 1).
SCHEDULES = {
    "sequential": "f0 b0 f1 b1",
    "1F1B": "f0 f1 b0 f2 b1 b2",
    "LIFO": "f0 f1 f2 b2 b1 b0",
    "interleaved": "f00 f10 f01 b01 f11 f20 b11 f30 b00 f21 b10 b21 f31 b20 b31 b30",
}


def parametrized(**axes: object):
    """All of `DISPATCHERS` and `KINDS`, by name, so that new ones are tested without a change here."""

    def decorate(test):
        for name, values in {"dispatcher": DISPATCHERS, "kind": KINDS, **axes}.items():
            test = pytest.mark.parametrize(name, list(values), ids=str)(test)
        return test

    return decorate


def microbatches(schedule: str) -> int:
    return 1 + max(int(step[1]) for step in SCHEDULES[schedule].split())


def gradients(
    kind: str, mode: str, *, dispatcher: str, dtype: torch.dtype, form: str, schedule: str
) -> dict[str, torch.Tensor | None]:
    """Of every input and parameter."""
    model = build(LAYERS, form, dtype, GroupedLayer, dispatcher=dispatcher)
    forward = checkpointed_by(kind, mode)
    inputs = batches(microbatches(schedule), dtype)
    steps = SCHEDULES[schedule].split()
    stages = [model[:1], model[1:]] if schedule == "interleaved" else [model]
    entered: dict[tuple[int, int], torch.Tensor] = {}
    left: dict[tuple[int, int], torch.Tensor] = {}
    for step in steps:
        number, stage = int(step[1]), int(step[2:] or 0)
        if step[0] == "f":
            x = left[number, stage - 1].detach().requires_grad_() if stage else inputs[number]
            entered[number, stage] = x
            left[number, stage] = forward(stages[stage], x)
        elif stage == len(stages) - 1:
            loss_of(left.pop((number, stage))).backward()
        else:
            left.pop((number, stage)).backward(entered[number, stage + 1].grad)
    return {f"input {n}": x.grad for n, x in enumerate(inputs)} | {n: p.grad for n, p in model.named_parameters()}


@functools.cache  # the same for all kinds, whose jobs run in one process
def gradients_without_checkpointing(**combination: object) -> dict[str, torch.Tensor | None]:
    return gradients("off", "none", **combination)


def all_combinations(rank: int, dispatcher: str, kind: str, dtype: torch.dtype) -> dict[str, object]:
    wrong, counts = [], {}
    for form, schedule in itertools.product(FORMS, SCHEDULES):
        combination = {"dispatcher": dispatcher, "dtype": dtype, "form": form, "schedule": schedule}
        expected = gradients_without_checkpointing(**combination)
        for mode in MODES:
            ac_moe.reset_stats()
            differing = differences(gradients(kind, mode, **combination), expected)
            stats = ac_moe.stats()
            wrong += [(form, schedule, mode, name) for name in differing]
            counts[form, schedule, mode] = (stats.stored, stats.served, stats.gemms_skipped, stats.live_entries)
    return {"wrong": wrong, "counts": counts}


@parametrized(dtype=(torch.float32, torch.bfloat16))
def test_gradients_are_those_without_checkpointing(
    ranks: Ranks, dispatcher: str, kind: str, dtype: torch.dtype
) -> None:
    for result in ranks.run(all_combinations, dispatcher=dispatcher, kind=kind, dtype=dtype, timeout=180):
        assert result["wrong"] == []
        assert len(result["counts"]) == len(FORMS) * len(SCHEDULES) * len(MODES)
        for (form, schedule, mode), counts in result["counts"].items():
            calls = LAYERS * microbatches(schedule)
            # Early stop ends the recompute before a combine that nothing comes after.
            served = 0 if (form, kind) == ("add", "early stop") else calls
            tail = served if mode == "moe_tail" else 0
            assert counts == ((0, 0, 0, 0) if mode == "none" else (calls, served, tail, 0))


def work_of_backwards(rank: int, dispatcher: str, kind: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Collectives and matrix products of one backward, by form and mode."""
    work = {}
    for form, mode in itertools.product(FORMS, MODES):
        model, (x,) = build(LAYERS, form, kind=GroupedLayer, dispatcher=dispatcher), batches(1)
        loss = loss_of(checkpointed_by(kind, mode)(model, x))
        with collectives() as count, profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss.backward()
        products = sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")
        work[form, mode] = (count.value, products)
    return work


@parametrized()
def test_exactly_what_is_skipped(ranks: Ranks, dispatcher: str, kind: str) -> None:
    """One collective fewer per layer with either, and one grouped GEMM, a product per local expert, with moe_tail."""
    for work in ranks.run(work_of_backwards, dispatcher=dispatcher, kind=kind):
        for form in FORMS:
            layers = 0 if (form, kind) == ("add", "early stop") else LAYERS
            collectives, products = work[form, "none"]
            assert work[form, "combine"] == (collectives - layers, products)
            assert work[form, "moe_tail"] == (collectives - layers, products - layers * LOCAL_EXPERTS)


def held(rank: int, dispatcher: str, kind: str, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the whole storages of all tensors that two forwards leave behind, by mode."""
    forwards = {mode: checkpointed_by(kind, mode) for mode in MODES} | {"pinned": checkpointed_as(kind, "none")}
    model, inputs = build(LAYERS, "mul", dtype, GroupedLayer, dispatcher=dispatcher), batches(2, dtype)
    gc.collect()
    bytes_then, left, losses = storage_bytes(), {}, []
    for mode, forward in forwards.items():
        losses += [loss_of(forward(model, x)) for x in inputs]
        bytes_now = storage_bytes()
        left[mode] = bytes_now - bytes_then
        bytes_then = bytes_now
    return left


@parametrized(dtype=(torch.float32, torch.bfloat16))
def test_memory_is_one_output_per_layer_and_microbatch(
    ranks: Ranks, dispatcher: str, kind: str, dtype: torch.dtype
) -> None:
    answers = ranks.run(held, dispatcher=dispatcher, kind=kind, dtype=dtype)
    for tokens, left in zip(TOKENS, answers, strict=True):
        # A reentrant checkpoint's forward leaves no node that holds HybridEP's handle: the region does, in any mode.
        if (dispatcher, kind) != ("hybridep", "reentrant"):
            assert left["pinned"] == left["none"]
        expected = left["pinned"] + LAYERS * 2 * tokens * HIDDEN * dtype.itemsize
        assert (left["combine"], left["moe_tail"]) == (expected, expected)


def many_steps(rank: int, dispatcher: str, kind: str) -> tuple[list[int], int, int]:
    model = build(LAYERS, kind=GroupedLayer, dispatcher=dispatcher)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    live, tensors = [], []
    gc.disable()  # freed by their last reference, not by a collection
    try:
        for step in range(50):
            mode = ("combine", "moe_tail")[step % 2]
            loss = loss_of(checkpointed_by(kind, mode)(model, *batches(1)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stats = stats_at_rest()
            live.append(stats.live_entries + stats.live_pinned)  # with the loss still held
            if step in (10, 48):
                tensors.append(len(live_tensors()))
    finally:
        gc.enable()
    return live, *tensors


@parametrized()
def test_nothing_is_left_after_any_step(ranks: Ranks, dispatcher: str, kind: str) -> None:
    for live, early, late in ranks.run(many_steps, dispatcher=dispatcher, kind=kind):
        assert live == [0] * 50
        assert late <= early


def inputs_die(rank: int, dispatcher: str, kind: str) -> dict[str, tuple[bool, bool]]:
    """Whether a block's input lives after the forward, and after the backward, with the loss still held."""
    lives = {}
    gc.disable()
    try:
        for mode in MODES:
            model, (leaf,) = build(1, kind=GroupedLayer, dispatcher=dispatcher), batches(1)
            x = leaf * 2  # saves nothing, so that the checkpoint alone holds it; a leaf hangs on the graph in any case
            alive = weakref.ref(x)
            loss = loss_of(checkpointed_by(kind, mode)(model, x))
            del x
            after_forward = alive() is not None
            loss.backward()
            assert loss.grad_fn is not None
            lives[mode] = (after_forward, alive() is not None)
    finally:
        gc.enable()
    return lives


@parametrized()
def test_no_input_is_held_after_backward(ranks: Ranks, dispatcher: str, kind: str) -> None:
    expected = dict.fromkeys(MODES, (True, False))
    assert ranks.run(inputs_die, dispatcher=dispatcher, kind=kind) == [expected] * 2
