"""Seconds, bytes and errors of one forward and backward."""

import gc
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tools.bench.rounds import time_rounds
from tools.bench_loss.contestants import PLAIN, Loss, plain

MIB = 2**20


class Inputs:
    """A head and its tokens: hidden `[tokens, width]`, weight `[vocab, width]`, labels `[tokens]`.

    Args:
        ignored: share of the labels that are -100, the first ones.
    """

    def __init__(self, tokens: int, width: int, vocab: int, dtype: torch.dtype, *, ignored: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
        self.weight = (torch.randn(vocab, width, generator=generator) * 0.02).to(dtype).requires_grad_()
        self.labels = torch.randint(vocab, (tokens,), generator=generator)
        self.labels[torch.randperm(tokens, generator=generator)[: int(tokens * ignored)]] = -100

    def step(self, loss: Loss) -> Tensor:
        """Forward and backward into empty gradients; the loss."""
        self.hidden.grad = self.weight.grad = None
        value = loss(self.hidden, self.weight, self.labels)
        value.backward()
        return value.detach()

    @property
    def gradient_bytes(self) -> int:
        return self.hidden.nbytes + self.weight.nbytes


def seconds(
    inputs: Inputs, losses: Mapping[str, Loss], rounds: int, progress: Callable[[int], None]
) -> dict[str, list[float]]:
    """Process seconds of a step, by name and round, after two steps of warm-up."""
    steps = {name: (lambda loss=loss: inputs.step(loss)) for name, loss in losses.items()}
    for step in steps.values():
        step()
        step()
    return time_rounds(steps, rounds=rounds, repeats=1, progress=progress)


def peak_bytes(inputs: Inputs, loss: Loss) -> int:
    """The most that torch's CPU allocator gave out during a step, less the returned gradients.

    Scratch memory of the BLAS library is not seen.
    """
    inputs.step(loss)  # what is compiled or cached on the first call is not the step's
    inputs.hidden.grad = inputs.weight.grad = None
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        inputs.step(loss)
    # The public `events()` credits allocations to operators and loses their order, without which there is no peak.
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak - inputs.gradient_bytes


def weight_gradient_error(inputs: Inputs, loss: Loss) -> float:
    """Norm of the error of the weight's gradient, relative to the gradient of plain cross-entropy in fp32."""
    wide = Inputs.__new__(Inputs)
    wide.hidden = inputs.hidden.detach().float().requires_grad_()
    wide.weight = inputs.weight.detach().float().requires_grad_()
    wide.labels = inputs.labels
    wide.step(plain)
    inputs.step(loss)
    return float((inputs.weight.grad.float() - wide.weight.grad).norm() / wide.weight.grad.norm())


def paired(times: Mapping[str, list[float]], name: str, to: str = PLAIN) -> float:
    """Median over the rounds of a time over that of `to` in the same round."""
    return median(a / b for a, b in zip(times[name], times[to], strict=True))
