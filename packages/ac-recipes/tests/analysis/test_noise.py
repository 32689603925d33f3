"""A difference in time is told from chance."""

import pytest

from ac_recipes.analysis.noise import LEAST_ROUNDS, within_noise

NONE = [1.0, 1.3, 0.9, 1.1, 1.0, 1.2, 1.05]


@pytest.mark.parametrize(
    ("seconds", "noise"),
    [
        ([t * 1.2 for t in NONE], False),
        ([t * 0.9 for t in NONE], False),
        ([t + (0.3 if i else -0.001) for i, t in enumerate(NONE)], False),  # one round against, by little
        ([t + (0.3 if i else -0.5) for i, t in enumerate(NONE)], True),  # and by much
        ([t + (0.1 if i % 2 else -0.1) for i, t in enumerate(NONE)], True),
        (NONE, True),
    ],
)
def test_by_how_well_the_rounds_agree(seconds, noise):
    assert within_noise(seconds, NONE) is noise


def test_with_fewer_rounds_nothing_can_be_told():
    slower = [t + 1 for t in NONE]
    assert not within_noise(slower[:LEAST_ROUNDS], NONE[:LEAST_ROUNDS])
    assert within_noise(slower[: LEAST_ROUNDS - 1], NONE[: LEAST_ROUNDS - 1])
