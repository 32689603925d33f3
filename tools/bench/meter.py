"""What one training step holds in memory and what gradients it gives."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

_END_OF_FORWARD = "tools.bench: end of forward"


@dataclass(frozen=True)
class Memory:
    """Bytes that the CPU allocator gave out during a step and had not got back.

    held: at the end of the forward, the logits and the loss included. peak: the most at any moment of the step, the
    gradients of the parameters included.
    """

    held: int
    peak: int


def train_step(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """One forward and backward into empty gradients; returns the loss."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    return output.loss.detach()


def step_memory(model: nn.Module, batch: Mapping[str, Tensor]) -> Memory:
    """The memory of one step, from every allocation and release that torch's CPU allocator reports."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = model(**batch)  # stays alive, logits and all, as in a loop that also logs from it
        with record_function(_END_OF_FORWARD):
            pass
        output.loss.backward()
    # The public `events()` credits allocations to operators and loses their order, without which there is no peak.
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now = peak = 0
    held = None
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
        elif event.name() == _END_OF_FORWARD:
            held = now
    if held is None:
        raise RuntimeError("the profiler did not record the end of the forward, so there is no memory to report")
    return Memory(held, peak)


def gradients(model: nn.Module) -> list[Tensor]:
    """A copy of every parameter's gradient, in model order: wrappers change the names, not the order."""
    return [parameter.grad.clone() for parameter in model.parameters()]


def compare_gradients(got: list[Tensor], expected: list[Tensor]) -> str:
    """`"equal"` bit for bit, or the largest error relative to the largest gradient of its parameter."""
    if all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True)):
        return "equal"
    errors = [
        float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in zip(got, expected, strict=True)
    ]
    return f"differ by {max(errors):.1e}"
