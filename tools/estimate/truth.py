"""What a training step really holds."""

import gc
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from ac_core.proof.meters import LiveBytes

_STEP, _END = "tools.estimate: step", "tools.estimate: end"


def peak_of_step(
    build: Callable[[], nn.Module],
    batch: dict[str, Tensor],
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
    *,
    steps: int = 3,
    microbatches: int = 1,
    threads: bool = False,
) -> int:
    """The most bytes alive in the last of `steps` training steps, the model's and the batch's included.

    build: makes the model, ready to train. batch: of which a copy is trained on. loss_of: one forward. microbatches: of
    a step, each of them the batch. threads: other threads release memory, those of gloo; see NOTE [ Two meters ].
    """
    gc.collect()
    with _Tensors() if threads else _Allocator() as meter:
        model = build()
        batch = {name: value.clone() for name, value in batch.items()}
        stepper = None
        if optimizer is not None:
            stepper = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        for step in range(steps):
            gc.collect()
            meter.begin(step)
            for _ in range(microbatches):
                loss = loss_of(model, batch)
                loss.backward()
                del loss
            if stepper is not None:
                stepper.step()
            meter.end(step)
            model.zero_grad(set_to_none=True)
    return meter.peak(steps - 1)


# NOTE [ Two meters ]
#
# Torch's CPU allocator reports what the thread does that runs the profiler (`profile_all_threads` reports nothing at
# all). Gloo releases buffers in threads of its own, now and then, which to the profiler stay alive for ever: peaks rose
# by a tenth within nine steps. So with several processes the bytes are those of ac-core's meter of tensors, which asks
# every storage itself. What gloo needs inside of a collective is then not counted.


class _Allocator:
    """Every allocation and release that torch's CPU allocator reports."""

    def __enter__(self) -> Self:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)

    def begin(self, step: int) -> None:
        with record_function(f"{_STEP} {step}"):
            pass

    def end(self, step: int) -> None:
        with record_function(f"{_END} {step}"):
            pass

    def peak(self, step: int) -> int:
        # The public `events()` credits allocations to operators and loses their order, without which there is no peak.
        events = sorted(self._profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        now, peak, inside = 0, 0, False
        for event in events:
            if event.name() == "[memory]":
                now += event.nbytes()
            elif event.name() == f"{_STEP} {step}":
                inside, peak = True, now
            elif event.name() == f"{_END} {step}":
                return peak
            if inside:
                peak = max(peak, now)
        raise RuntimeError("the profiler did not record the step, so there is no memory to report")


class _Tensors:
    """Every storage of a tensor, from its first operation until it is freed, by whichever thread."""

    def __enter__(self) -> Self:
        self._meter = LiveBytes().__enter__()
        self._peaks: dict[int, int] = {}
        return self

    def __exit__(self, *error: Any) -> None:
        self._meter.__exit__(*error)

    def begin(self, _: int) -> None:
        self._meter.peak = self._meter.current

    def end(self, step: int) -> None:
        self._peaks[step] = self._meter.peak

    def peak(self, step: int) -> int:
        return self._peaks[step]
