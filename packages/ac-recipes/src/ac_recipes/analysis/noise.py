"""Whether two series of times differ by more than chance."""

from collections.abc import Sequence

CHANCE = 0.05
LEAST_ROUNDS = 6
"""With fewer, even rounds that all agree would do so by chance more often."""

RULE = (
    "A difference in time counts where chance would bring about one as consistent at most one time in 20 (Wilcoxon's "
    "signed-rank test on the differences from none, round by round); otherwise it is within noise."
)


def within_noise(seconds: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether the times of the same rounds differ no more than by chance, by `RULE`: two-sided and exact.

    Rounds are compared, since what else the machine does slows all policies of a round; and by rank, since it may slow
    one turn by any amount.
    """
    differences = sorted((a - b for a, b in zip(seconds, reference, strict=True) if a != b), key=abs)
    slower = sum(rank for rank, difference in enumerate(differences, start=1) if difference > 0)
    ways = [1]  # in how many of the ways to choose signs the ranks of the slower rounds have this sum
    for rank in range(1, len(differences) + 1):
        longer = [*ways, *[0] * rank]
        ways = [count + (longer[place - rank] if place >= rank else 0) for place, count in enumerate(longer)]
    extreme = min(slower, len(ways) - 1 - slower)
    return 2 * sum(ways[: extreme + 1]) / sum(ways) > CHANCE
