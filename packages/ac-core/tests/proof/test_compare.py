"""Differences by name, and by how much."""

import math

import pytest
import torch

from ac_core.proof.compare import Difference, compare

NAN, INF = math.nan, math.inf


def only(expected, got):
    comparison = compare("gradients", {"w": expected}, {"w": got})
    assert comparison.compared == 1
    return comparison.differences[0] if comparison.differences else None


@pytest.mark.parametrize(
    "value",
    [torch.tensor([1.0, NAN, INF]), torch.zeros(0), torch.tensor(3), torch.tensor(1j), 2, NAN, None, "text"],
    ids=str,
)
def test_equal(value):
    assert only(value, value.clone() if isinstance(value, torch.Tensor) else value) is None


def test_nan_equals_nan_of_other_bits_and_zero_differs_from_minus_zero():
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert only(torch.tensor([NAN]), other) is None
    signs = only(torch.tensor([NAN, 0.0]), torch.tensor([NAN, -0.0]))
    assert signs == Difference("gradients", "w", "differs", 0.0, 0.0)


@pytest.mark.parametrize(
    ("expected", "got", "max_abs", "max_rel"),
    [
        ([1.0, -4.0], [1.5, -4.0], 0.5, 0.125),
        ([0.0, 0.0], [0.0, 1.0], 1.0, INF),
        ([1.0, NAN], [1.0, 2.0], INF, INF),
        ([INF, INF], [INF, -INF], INF, INF),
        ([INF, 2.0], [INF, 1.0], 1.0, 0.5),
        ([3, 4], [3, 2], 2.0, 0.5),
        ([True], [False], 1.0, 1.0),
    ],
)
def test_by_how_much(expected, got, max_abs, max_rel):
    found = only(torch.tensor(expected), torch.tensor(got))
    assert (found.what, found.max_abs, found.max_rel) == ("differs", max_abs, max_rel)


def test_what_is_not_of_the_same_kind():
    assert only(torch.ones(2), torch.ones(3)).what == "is torch.float32 (3,) instead of torch.float32 (2,)"
    assert only(torch.ones(2), torch.ones(2).half()).what == "is torch.float16 (2,) instead of torch.float32 (2,)"
    assert only(None, torch.ones(2)).what == "is torch.float32 (2,) instead of None"
    assert only(1, 2).what == "is 2 instead of 1"
    assert only(1, True).what == "is True instead of 1"


def test_missing_and_additional_names():
    comparison = compare("buffers", {"a": 1, "b": 1, "c": 1}, {"b": 1, "c": 2, "d": 1}, without=frozenset("c"))
    assert comparison.compared == 3
    assert not comparison
    assert comparison.names == ("a", "d")
    assert str(comparison) == "a is missing; d is there, and should not"


def test_nothing_to_compare_is_equal():
    assert compare("buffers", {}, {})
    assert str(compare("buffers", {"a": 1}, {"a": 1})) == "equal (1)"
