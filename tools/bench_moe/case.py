"""One model on one rank: its step under each variant, what that step does, and how long it takes."""

import gc
import random
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import ac_moe
from tools.bench_moe.layer import build
from tools.bench_moe.records import (
    CHECKPOINT,
    COMBINE,
    NONE,
    OFF,
    ONE_COMBINE,
    ONE_PROJECTION,
    TAIL,
    VARIANTS,
    Measured,
    Sample,
    Work,
)
from tools.bench_moe.settings import Settings

_CONTEXTS = {
    CHECKPOINT: ac_moe.context_fn("none"),
    NONE: ac_moe.context_fn("none", pin_routing=True),
    COMBINE: ac_moe.context_fn("combine"),
    TAIL: ac_moe.context_fn("moe_tail"),
}
_ALONE = 10  # calls in a row of what is timed alone
_COLLECTIVE = "c10d::"


class Case:
    """The model of one dispatcher and form. A step is forwards of all microbatches, then their backwards in order."""

    def __init__(self, settings: Settings, dispatcher: str, form: str, device: torch.device) -> None:
        self.dispatcher, self.form, self._device = dispatcher, form, device
        self.model = build(settings, dispatcher, form == "gated", device)
        shape = settings.shape
        generator = torch.Generator().manual_seed(1000 + dist.get_rank())
        self.inputs = [
            torch.randn(shape.tokens, shape.hidden, generator=generator)
            .to(device, getattr(torch, settings.dtype))
            .requires_grad_()
            for _ in range(shape.microbatches)
        ]

    def step(self, variant: str, between: Callable[[], object] = lambda: None) -> None:
        """Forwards and backwards into empty gradients; `between` is called between the two."""
        self.model.zero_grad(set_to_none=True)
        for x in self.inputs:
            x.grad = None
        losses = [self._forward(x, variant).float().square().mean() for x in self.inputs]
        between()
        for loss in losses:
            loss.backward()

    def gradients(self) -> list[Tensor]:
        """Of the last step: inputs first, then parameters."""
        return [tensor.grad for tensor in (*self.inputs, *self.model.parameters())]

    def count(self, variant: str, expected: list[Tensor]) -> Work:
        """What a step does, and whether its gradients are `expected` bit for bit."""
        in_flight: list[ac_moe.Stats] = []
        ac_moe.reset_stats()
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
            self.step(variant, lambda: in_flight.append(ac_moe.stats()))
        stats = ac_moe.stats()
        # The public `key_averages()` takes a second or two for the same events.
        events = profiler.profiler.kineto_results.events()
        names = Counter(event.name() for event in events)
        return Work(
            collectives={
                name.removeprefix(_COLLECTIVE): calls for name, calls in names.items() if name.startswith(_COLLECTIVE)
            },
            product_flops=sum(event.flops() for event in events if event.name() == "aten::mm"),
            stored=stats.stored,
            served=stats.served,
            collectives_skipped=stats.collectives_skipped,
            gemms_skipped=stats.gemms_skipped,
            kept_bytes=in_flight[0].live_bytes,
            pinned_bytes=in_flight[0].live_pinned_bytes,
            left_bytes=stats.live_bytes + stats.live_pinned_bytes,
            only_memory=stats.only_memory,
            gradients_equal=all(map(torch.equal, self.gradients(), expected)),
        )

    def alone(self) -> dict[str, Callable[[], object]]:
        """One combine and one down projection of the first layer, on the rows that its router sends."""
        layer, x = self.model[0], self.inputs[0].detach()
        with torch.no_grad():
            sent = layer.dispatch(x)
            inner = layer.activate(sent)
            rows = layer.project(inner, sent)
        return {
            ONE_COMBINE: torch.no_grad()(lambda: layer.dispatcher.combine(rows, sent)),
            ONE_PROJECTION: torch.no_grad()(lambda: layer.project(inner, sent)),
        }

    def sample(self, call: Callable[[], object], repeats: int) -> Sample:
        """Seconds of one of `repeats` calls; the ranks begin together."""
        dist.barrier()
        self._synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            call()
        self._synchronize()
        return Sample((time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats)

    def _forward(self, x: Tensor, variant: str) -> Tensor:
        for layer in self.model:
            x = layer(x) if variant == OFF else checkpoint(layer, x, use_reentrant=False, context_fn=_CONTEXTS[variant])
        return x

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(case: Case, rounds: int, say: Callable[[str], None]) -> Measured:
    """Counts a step of every variant, then times all of them against one another.

    Everything runs in every round, in an order that changes from round to round and is the same on all ranks.
    """
    case.step(OFF)
    expected = [gradient.clone() for gradient in case.gradients()]
    work = {variant: case.count(variant, expected) for variant in VARIANTS}
    say("counted")
    calls = {variant: (lambda variant=variant: case.step(variant), 1) for variant in VARIANTS}
    calls |= {name: (call, _ALONE) for name, call in case.alone().items()}
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    gc.collect()
    gc.freeze()  # the collector runs as in training, but does not walk through everything that was imported
    for number in range(rounds):
        order = list(calls)
        random.Random(number).shuffle(order)
        for name in order:
            samples[name].append(case.sample(*calls[name]))
        say(f"round {number + 1} of {rounds}")
    gc.unfreeze()
    return Measured(case.dispatcher, case.form, work, samples)
