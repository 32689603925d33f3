"""The exact optimum over one option per block, under a limit on peak memory.

NOTE [ Peak of a plan ]
A backward goes through the blocks from the last to the first. When it is at block `i`, memory holds what the blocks
before `i` keep, what block `i` needs while its backward runs (which depends on its own option: a block that is run
again has all of its activations for that moment), and what no option changes, such as the gradients of the parameters
behind it. Before the backward begins there is the loss, on top of what all blocks keep. So

    peak = max(max over i of (kept of the blocks before i + working_i + fixed_i), kept of all blocks + fixed at the end)

Going through the blocks from the first to the last, whether a partial choice breaks the limit depends on its options
and on the sum of what it keeps, nothing else. Of two partial choices of which neither has broken the limit, one that
keeps no more and costs no more is never the worse start. Only those that no other beats in both are carried on, so
nothing is lost and the result is the optimum.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """A way to checkpoint one block.

    name: of the option. kept: bytes from the block's forward to its backward. working: bytes during its backward, all
    that it then has, what it kept included. cost: of what is run again; any unit, such as FLOPs.
    """

    name: str
    kept: int
    working: int
    cost: float


@dataclass(frozen=True)
class Solution:
    """options: by block. peak: bytes. cost: sum over the blocks."""

    options: tuple[Option, ...]
    peak: int
    cost: float


@dataclass(frozen=True)
class _Partial:
    """A choice for the first blocks. kept, cost: sums. peak: so far. last, before: the choice, linked from its end."""

    kept: int
    cost: float
    peak: int
    last: Option | None = None
    before: "_Partial | None" = None


def solve(
    blocks: Sequence[Sequence[Option]], limit: float, *, fixed: Sequence[int] | None = None, end: int = 0
) -> Solution | None:
    """The cheapest choice whose peak is at most `limit` bytes.

    Args:
        blocks: the options of each block, at least one, in the order of the forward.
        limit: bytes; may be `float("inf")`.
        fixed: bytes beside the blocks' while each block's backward runs; zeros if not given.
        end: bytes beside the blocks' between forward and backward, where the loss is.

    Returns:
        `None` if every choice has a higher peak.
    """
    fixed = [0] * len(blocks) if fixed is None else fixed
    partials = [_Partial(0, 0.0, 0)]
    for options, beside in zip(blocks, fixed, strict=True):
        partials = _best(_extended(partials, options, beside, limit))
    finished = [
        _Partial(p.kept, p.cost, max(p.peak, p.kept + end), p.last, p.before) for p in partials if p.kept + end <= limit
    ]
    if not finished:
        return None
    best = min(finished, key=lambda p: (p.cost, p.peak))
    return Solution(_options(best), best.peak, best.cost)


def least_peak(blocks: Sequence[Sequence[Option]], *, fixed: Sequence[int] | None = None, end: int = 0) -> Solution:
    """The choice with the lowest peak; among equals the cheapest."""
    fixed = [0] * len(blocks) if fixed is None else fixed
    low = 0
    high = max(end, *fixed, 0) + sum(max(option.working + option.kept for option in options) for options in blocks)
    while low < high:
        middle = (low + high) // 2
        if solve(blocks, middle, fixed=fixed, end=end) is None:
            low = middle + 1
        else:
            high = middle
    found = solve(blocks, low, fixed=fixed, end=end)
    assert found is not None
    return found


def pareto(
    blocks: Sequence[Sequence[Option]], *, fixed: Sequence[int] | None = None, end: int = 0, most: int = 64
) -> list[Solution]:
    """Choices of which none has another that is cheaper at no higher peak, from the cheapest to the smallest.

    At most `most` of them, evenly over the range of peaks where there are more.
    """
    smallest = least_peak(blocks, fixed=fixed, end=end)
    cheapest = solve(blocks, float("inf"), fixed=fixed, end=end)
    assert cheapest is not None
    found = [cheapest]
    step = max(1, (cheapest.peak - smallest.peak) // max(1, most - 1))
    while found[-1].peak > smallest.peak and found[-1].cost < smallest.cost:
        limit = max(smallest.peak, found[-1].peak - step)
        solution = solve(blocks, limit, fixed=fixed, end=end)
        assert solution is not None
        found.append(solution)
    return found


def _extended(partials: list[_Partial], options: Sequence[Option], beside: int, limit: float) -> list[_Partial]:
    longer = []
    for partial in partials:
        for option in options:
            here = partial.kept + option.working + beside
            if here <= limit:
                kept, cost = partial.kept + option.kept, partial.cost + option.cost
                longer.append(_Partial(kept, cost, max(partial.peak, here), option, partial))
    return longer


def _best(partials: list[_Partial]) -> list[_Partial]:
    """Those that no other beats in bytes kept and in cost."""
    best: list[_Partial] = []
    for partial in sorted(partials, key=lambda p: (p.kept, p.cost, p.peak)):
        if not best or partial.cost < best[-1].cost:
            best.append(partial)
    return best


def _options(partial: _Partial) -> tuple[Option, ...]:
    chosen = []
    while partial.last is not None:
        assert partial.before is not None
        chosen.append(partial.last)
        partial = partial.before
    return tuple(reversed(chosen))
