from collections import Counter

import pytest

from tools.bench.rounds import best_ratio, paired_difference, paired_ratio, paired_spread, time_rounds

# The machine is twice as slow in the third round: what is paired by round does not notice.
SECONDS = {"none": [1.0, 1.0, 2.0, 1.0, 1.1], "full": [1.25, 1.3, 2.5, 1.2, 1.375]}


def test_variants_are_compared_with_none_of_the_same_round():
    assert paired_ratio(SECONDS, "full", "none") == pytest.approx(1.25)
    assert paired_difference(SECONDS, "full", "none") == pytest.approx(0.275)
    assert paired_spread(SECONDS, "full", "none") == pytest.approx((1.275 - 1.225) / 2)
    assert best_ratio(SECONDS, "full", "none") == pytest.approx(1.2)


def test_every_variant_runs_in_every_round_and_in_changing_order():
    ran, rounds_done = [], []
    steps = {name: (lambda name=name: ran.append(name)) for name in ("none", "full", "selective")}
    seconds = time_rounds(steps, rounds=8, repeats=2, progress=rounds_done.append)
    assert Counter(ran) == {"none": 16, "full": 16, "selective": 16}
    assert {name: len(of_rounds) for name, of_rounds in seconds.items()} == {"none": 8, "full": 8, "selective": 8}
    assert rounds_done == [1, 2, 3, 4, 5, 6, 7, 8]
    orders = {tuple(ran[start : start + 6 : 2]) for start in range(0, 48, 6)}
    assert len(orders) > 2
    assert all(set(order) == set(steps) for order in orders)
