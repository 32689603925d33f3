"""Budgets are read strictly."""

import subprocess
import sys

import pytest

from ac_core.planning.budget import parse_budget


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("24GB", 24 * 10**9),
        ("512MiB", 2**29),
        ("2TB", 2 * 10**12),
        ("4096B", 4096),
        (10_000_000, 10_000_000),
        (0.5, 0.5),
        (1.0, 1.0),
        ("50%", 0.5),
        ("device", "device"),
    ],
)
def test_forms(given, budget):
    assert parse_budget(given) == budget


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (24, "give a unit: '24GiB'"),
        (24.0, "a size has a unit: '24GiB'"),
        (0.0, r"^0\.0 is no fraction above 0 and up to 1$"),
        (1e9, r"^1000000000\.0 is no fraction above 0 and up to 1$"),
        (-1, "too few for any model; give a size such as '24GiB'"),
        (0, "^0 would be bytes, too few for any model; give a size such as '24GiB'"),
        (True, "is not a size"),
        (None, "is not a size"),
        ([1], "is not a size"),
        ("24", "write '24GiB'"),
        ("24gib", "did you mean 24GiB"),
        ("24Gi", r"^'24Gi' has no unit.*; did you mean 24GiB\?$"),
        ("24G", r"^'24G' has no unit.*; did you mean 24GiB\?$"),
        ("512m", "did you mean 512MiB"),
        ("24Go", "has no unit of memory: [^;]*$"),
        ("-24GiB", "is not a size"),
        ("1e9B", "is not a size"),
        ("150%", "^'150%' is no share above 0% and up to 100%"),
        ("0%", "^'0%' is no share"),
        ("0GiB", "too little"),
        ("all", "is not a size"),
        ("", "is not a size"),
        (float("nan"), "no fraction"),
    ],
)
def test_anything_else_is_refused_with_what_was_meant(given, message):
    with pytest.raises(ValueError, match=message):
        parse_budget(given)


def test_it_loads_without_torch():
    script = "import sys, ac_core.planning.budget; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
