"""What is held out is spread over the data and never trained on."""

import pytest

from ac_recipes.data.holdout import places_to_hold_out
from ac_recipes.errors import UsageError


def test_both_sides_together_are_everything_once():
    kept, chosen = places_to_hold_out(20, 0.1, "records")
    assert chosen == [9, 19]
    assert kept == [place for place in range(20) if place not in {9, 19}]
    assert places_to_hold_out(20, 0.0, "records") == (list(range(20)), [])


def test_something_is_left_to_train_on():
    with pytest.raises(UsageError, match=r"dataset\.validation_fraction: of 20 records none is left to train on"):
        places_to_hold_out(20, 0.99, "records")
