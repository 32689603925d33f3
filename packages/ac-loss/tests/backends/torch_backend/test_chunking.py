import pytest

from ac_loss.backends.torch_backend.chunking import block_rows, chunk_rows, slab_rows, spans, tile_shape


@pytest.mark.parametrize(
    ("tokens", "vocab", "itemsize", "rows"),
    [
        (0, 32000, 4, 1),
        (1, 32000, 4, 1),
        (256, 32000, 4, 256),
        (257, 32000, 4, 129),  # two chunks, balanced
        (512, 32000, 2, 512),
        (513, 32000, 2, 257),
        (4096, 128256, 4, 256),
        (4096, 128256, 2, 512),
        (4096, 256000, 4, 128),  # 131 fit the byte budget: 32 chunks
        (4096, 1000000, 4, 128),  # the floor wins over the budget
        (4096, 32000, 8, 256),
    ],
)
def test_chunk_rows(tokens, vocab, itemsize, rows):
    assert chunk_rows(tokens, vocab, itemsize) == rows


@pytest.mark.parametrize(
    ("tokens", "vocab", "itemsize", "width", "rows"),
    [
        (0, 32000, 4, 4096, 1),
        (512, 128256, 4, 4096, 512),  # 125 MiB of logits more, and no sum of 2004 MiB
        (512, 128256, 4, 64, 256),  # the sum is 31 MiB
        (512, 128256, 4, 256, 256),  # as many bytes
        (512, 128256, 4, 257, 512),
        (513, 32000, 4, 4096, 171),
        (4096, 128256, 4, 4096, 256),
        (512, 256000, 2, 4096, 512),
    ],
)
def test_one_chunk_is_larger_where_that_takes_less_than_a_sum(tokens, vocab, itemsize, width, rows):
    assert chunk_rows(tokens, vocab, itemsize, sum_bytes=vocab * width * 4) == rows


def test_pieces_hold_at_least_one_row():
    assert block_rows("cpu", 2**30) == slab_rows("cpu", 2**30) == slab_rows("cuda", 2**40) == 1
    assert block_rows("cpu", 128256 * 4) == 32
    assert block_rows("cuda", 128256 * 4) == 130


def test_spans_cover_everything_once():
    assert list(spans(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(spans(0, 4)) == []


@pytest.mark.parametrize(
    ("tokens", "vocab", "shape"),
    [
        (4096, 128256, (4096, 2048)),
        (5000, 128256, (2500, 3328)),  # balanced, and a multiple of 64
        (16, 128256, (16, 16064)),  # an eighth, though all would fit
        (16, 1000, (16, 512)),
        (16, 300, (16, 300)),
        (0, 1, (1, 1)),
    ],
)
def test_tile_shape(tokens, vocab, shape):
    assert tile_shape(tokens, vocab, 4, "cpu") == shape
