"""What a training step really holds, from every allocation and release that torch's CPU allocator reports."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

_STEP, _END = "tools.estimate: step", "tools.estimate: end"


def peak_of_step(
    build: Callable[[], nn.Module],
    batch: dict[str, Tensor],
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
    *,
    steps: int = 3,
    microbatches: int = 1,
) -> int:
    """The most bytes alive in the last of `steps` training steps, the model's and the batch's included.

    build: makes the model, ready to train. batch: of which a copy is trained on. loss_of: one forward. microbatches: of
    a step, each of them the batch.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build()
        batch = {name: value.clone() for name, value in batch.items()}
        stepper = None
        if optimizer is not None:
            stepper = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        for step in range(steps):
            gc.collect()
            with record_function(f"{_STEP} {step}"):
                pass
            for _ in range(microbatches):
                loss = loss_of(model, batch)
                loss.backward()
                del loss
            if stepper is not None:
                stepper.step()
            with record_function(f"{_END} {step}"):
                pass
            model.zero_grad(set_to_none=True)
    return _peak_between(profiler, f"{_STEP} {steps - 1}", f"{_END} {steps - 1}")


def _peak_between(profiler: Any, start: str, end: str) -> int:
    # The public `events()` credits allocations to operators and loses their order, without which there is no peak.
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now, peak, inside = 0, 0, False
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
        elif event.name() == start:
            inside, peak = True, now
        elif event.name() == end:
            return peak
        if inside:
            peak = max(peak, now)
    raise RuntimeError("the profiler did not record the step, so there is no memory to report")
