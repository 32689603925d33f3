"""The optimum is that of exhaustive search."""

import random
from itertools import product

import pytest

from ac_core.planning.knapsack import Option, least_peak, pareto, solve

KIB = 1024


def peak(chosen: tuple[Option, ...], fixed: list[int], end: int) -> int:
    """As the NOTE in the module defines it."""
    kept, highest = 0, 0
    for option, beside in zip(chosen, fixed, strict=True):
        highest = max(highest, kept + option.working + beside)
        kept += option.kept
    return max(highest, kept + end)


def instance(seed: int) -> tuple[list[list[Option]], list[int], int]:
    draw = random.Random(seed)
    blocks = [
        [
            Option(str(number), draw.randint(0, 9), draw.randint(0, 12), draw.choice([0, 1, 2.5, draw.random()]))
            for number in range(draw.randint(1, 4))
        ]
        for _ in range(draw.randint(1, 5))
    ]
    return blocks, [draw.randint(0, 6) for _ in blocks], draw.randint(0, 10)


@pytest.mark.parametrize("seed", range(250))
def test_no_regret_against_exhaustive_search(seed: int):
    blocks, fixed, end = instance(seed)
    every = [(peak(chosen, fixed, end), sum(o.cost for o in chosen)) for chosen in product(*blocks)]
    for limit in sorted({peak for peak, _ in every} | {0}):
        best = min((cost for peak, cost in every if peak <= limit), default=None)
        found = solve(blocks, limit, fixed=fixed, end=end)
        if best is None:
            assert found is None
        else:
            assert found is not None
            assert found.cost == pytest.approx(best, abs=1e-9)
            assert found.peak == peak(found.options, fixed, end) <= limit
            assert found.cost == pytest.approx(sum(option.cost for option in found.options))
    assert least_peak(blocks, fixed=fixed, end=end).peak == min(peak for peak, _ in every)


def test_more_memory_never_costs_more_and_the_curve_ends_at_both_ends():
    between = Option("kept", 30 * KIB, 120 * KIB, 5)
    block = [Option("none", 100 * KIB, 130 * KIB, 0), between, Option("full", KIB, 90, 9)]
    curve = pareto([block] * 40, end=7)
    assert curve[0].cost == 0
    assert curve[-1].peak == least_peak([block] * 40, end=7).peak
    assert [s.peak for s in curve] == sorted((s.peak for s in curve), reverse=True)
    assert [s.cost for s in curve] == sorted(s.cost for s in curve)
    assert 20 < len(curve) <= 65


def test_eighty_blocks_of_seven_options_are_solved_exactly_in_a_moment():
    options = [Option(str(i), 1000 * i + 7 * i * i, 9000, (6 - i) ** 2) for i in range(7)]
    found = solve([options] * 80, 80 * 2500 + 9000)
    assert found is not None
    assert found.peak <= 80 * 2500 + 9000
