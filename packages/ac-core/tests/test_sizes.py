import pytest

from ac_core.sizes import counted, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (3 * 2**29, "1.50 GiB (1.61 GB)"),
        (2**30 - 1, "1024.00 MiB (1073.74 MB)"),
        (5 * 2**19, "2.50 MiB (2.62 MB)"),
        (51200, "50.00 KiB (51.20 kB)"),
        (1023, "1023 B"),
        (0, "0 B"),
        (-(2**20), "-1.00 MiB (-1.05 MB)"),
    ],
)
def test_the_largest_unit_that_leaves_at_least_one(count, text):
    assert size_text(count) == text


def test_the_sizes_of_a_table_have_one_unit():
    assert [size_text(count, like=2**31) for count in (2**31, 2**20)] == ["2.00 GiB (2.15 GB)", "0.00 GiB (0.00 GB)"]


def test_one_is_no_plural():
    assert [counted(number, "block") for number in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
