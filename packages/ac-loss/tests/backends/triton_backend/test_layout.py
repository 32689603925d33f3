import pytest

from ac_loss.backends.triton_backend import layout
from ac_loss.backends.triton_backend.layout import Plan, block_width, spans, splits


def plan(tokens, vocab, hidden_size, *, itemsize=2, hidden=True, weight=True, elsewhere=False):
    return Plan.make(
        tokens=tokens,
        vocab=vocab,
        hidden_size=hidden_size,
        weight_itemsize=itemsize,
        grad_hidden=hidden,
        grad_weight=weight,
        elsewhere=elsewhere,
    )


@pytest.mark.parametrize("tokens", [1, 127, 129, 8192, 1_000_000])
@pytest.mark.parametrize("vocab", [1, 128, 129, 32000, 256000])
def test_splits_cover_the_vocabulary_and_none_is_empty(tokens, vocab):
    parts, tiles = splits(tokens, vocab)
    assert (parts - 1) * tiles * layout.BLOCK_COLUMNS < vocab <= parts * tiles * layout.BLOCK_COLUMNS
    assert parts == 1 or parts * -(-tokens // layout.BLOCK_ROWS) <= layout.PROGRAMS


def test_a_tile_is_no_wider_than_what_it_reads():
    assert (block_width(4096, 2), block_width(4096, 4), block_width(17, 4), block_width(5, 2)) == (64, 32, 32, 16)


@pytest.mark.parametrize(
    ("tokens", "vocab", "hidden_size"),
    [(8192, 256000, 2304), (4096, 128256, 2048), (16384, 128256, 2048), (8192, 128256, 4096), (2048, 151936, 5120)],
)
def test_all_in_all_within_the_target(tokens, vocab, hidden_size):
    """Peak at most 1.05 x the gradients, at the shapes of Gemma 2 2B, Llama 3.2 1B, Llama 3 8B, Qwen."""
    made = plan(tokens, vocab, hidden_size)
    gradients = 2 * hidden_size * (vocab + tokens)
    assert made.borrows
    assert gradients + 2 * made.rows * made.columns <= 1.05 * gradients
    assert made.columns >= 256, "wide enough for the products to be worth a GPU's while"
    # The sum of hidden's gradient fits where it is put, aligned, and no block straddles the border.
    assert (vocab - made.kept) * hidden_size * 2 >= tokens * hidden_size * 4
    assert made.kept % made.columns == 0
    assert made.kept * hidden_size * 2 % 16 == 0


def test_what_is_not_wanted_is_not_borrowed_from():
    assert not plan(4096, 128256, 2048, hidden=False).borrows
    assert not plan(4096, 128256, 2048, elsewhere=True).borrows
    frozen = plan(4096, 128256, 2048, weight=False)
    assert not frozen.borrows
    assert frozen.rows == layout.ROWS_WITHOUT_WEIGHT
    assert not plan(70000, 128256, 2048).borrows, "twice the tokens do not fit into the vocabulary"
    assert plan(70000, 128256, 2048, itemsize=4).borrows


def test_spans():
    assert list(spans(3, 10, 4)) == [slice(3, 7), slice(7, 10)]
    assert list(spans(3, 3, 4)) == []
