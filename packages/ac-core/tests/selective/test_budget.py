from hypothesis import given
from hypothesis import strategies as st

from ac_core.selective.budget import Candidate, spend

LLAMA = [("q", 4), ("k", 2), ("v", 2), ("o", 4), ("gate", 11), ("up", 11), ("down", 4)]


def llama(down_needed=False):
    return [
        Candidate(name, size, 11 if name == "down" else 4, name != "down" or down_needed, name in ("q", "k", "v", "o"))
        for name, size in LLAMA
    ]


def test_an_output_that_no_recompute_needs_is_not_kept():
    assert all("down" not in kept for kept in spend([llama()] * 8))


def test_the_output_with_the_most_flops_a_byte_comes_first():
    assert all("down" in kept for kept in spend([llama(down_needed=True)] * 8))


def test_what_a_block_leaves_over_goes_to_the_next():
    # Every second matmul of a block: q, v, gate, down: 21. Kept: q, k, v, o: 12, and with gate 23.
    assert ["gate" in kept for kept in spend([llama()] * 8)] == [False, True, True, True, True, False, True, True]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9), st.booleans(), st.booleans()), max_size=9),
        max_size=9,
    )
)
def test_never_more_bytes_than_every_second_matmul(blocks):
    candidates = [[Candidate(i, *values) for i, values in enumerate(block)] for block in blocks]
    used = allowed = 0
    for block, kept in zip(candidates, spend(candidates), strict=True):
        used += sum(c.nbytes for c in block if c.key in kept)
        allowed += sum(c.nbytes for c in block[::2])
        assert used <= allowed
        assert all(c.needed for c in block if c.key in kept)
