"""Timing of several variants against one another on a machine that is never quiet.

Every variant runs in every round, in an order that changes from round to round, and is compared with the others of the
same round. Seconds are those of the process, so that other processes do not count; what they do to the caches and the
clock hits all variants of a round alike.
"""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

Seconds = Mapping[str, Sequence[float]]
"""Process seconds of one step, by variant, round by round."""


def time_rounds(
    steps: Mapping[str, Callable[[], object]], *, rounds: int, repeats: int, progress: Callable[[int], None]
) -> dict[str, list[float]]:
    """Run each of `steps` `repeats` times in every one of `rounds`; seconds of one step, by name and round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()  # the collector runs as in training, but does not walk through the models of all the other variants
    try:
        for number in range(rounds):
            order = list(steps)
            random.Random(number).shuffle(order)
            for name in order:
                step = steps[name]
                start = time.process_time()
                for _ in range(repeats):
                    step()
                seconds[name].append((time.process_time() - start) / repeats)
            progress(number + 1)
    finally:
        gc.unfreeze()
    return seconds


def paired_ratio(seconds: Seconds, name: str, to: str) -> float:
    """Median over the rounds of `name`'s time divided by that of `to` in the same round."""
    return median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))


def paired_spread(seconds: Seconds, name: str, to: str) -> float:
    """Half the interquartile range of what `paired_ratio` is the median of: how far single rounds stray from it."""
    lower, _, upper = quantiles((a / b for a, b in zip(seconds[name], seconds[to], strict=True)), n=4)
    return (upper - lower) / 2


def paired_difference(seconds: Seconds, name: str, to: str) -> float:
    """Median over the rounds of `name`'s time less that of `to` in the same round, in seconds."""
    return median(a - b for a, b in zip(seconds[name], seconds[to], strict=True))


def best_ratio(seconds: Seconds, name: str, to: str) -> float:
    """The best round of `name` over the best round of `to`."""
    return min(seconds[name]) / min(seconds[to])
