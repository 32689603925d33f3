"""Whether two series of times differ by more than chance."""

from collections.abc import Sequence
from math import comb

CHANCE = 0.05
LEAST_ROUNDS = 6
"""With fewer, even rounds that all agree would do so by chance more often."""

RULE = (
    "A difference in time counts where the rounds agree on which of the two is faster, as often as chance brings about "
    "at most one time in 20 (sign test over the rounds, each of which runs every policy); otherwise it is within noise."
)


def within_noise(seconds: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether the times of the same rounds differ no more than by chance: `RULE`, a two-sided sign test.

    Rounds and not spreads are compared, since what else a machine does slows down all policies of a round alike.
    """
    pairs = [(a, b) for a, b in zip(seconds, reference, strict=True) if a != b]
    fewer = min(sum(a < b for a, b in pairs), sum(a > b for a, b in pairs))
    return 2 * sum(comb(len(pairs), k) for k in range(fewer + 1)) / 2 ** len(pairs) > CHANCE
