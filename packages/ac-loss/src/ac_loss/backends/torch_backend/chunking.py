"""How many tokens at a time. Integers only, so that memory can be reasoned about without running anything."""

from collections.abc import Iterator

MIB = 2**20

# Measured on CPU: fewer rows make the GEMMs slow (64 rows cost 20 %), more only cost memory. Where bf16 is multiplied
# as such, GEMMs are twice as fast and need twice the rows to hide the elementwise work and the weight gradient's
# accumulation.
ROWS_WIDE, ROWS_NARROW, ROWS_FLOOR = 256, 512, 128
LOGITS_BYTES = 128 * MIB

# One chunk may be larger than each of several, where that takes less than the fp32 sum of the weight's gradient that
# several need: gigabytes at real sizes.
ROWS_ALONE = 512

# Elementwise passes over a block, and slabs of the weight gradient, are worth keeping in a CPU's cache; a CPU also
# converts a whole operand before adding it to another dtype. Elsewhere bigger pieces mean fewer launches.
BLOCK_BYTES_CPU, BLOCK_BYTES_OTHER = 16 * MIB, 64 * MIB
SLAB_BYTES_CPU, SLAB_BYTES_OTHER = 4 * MIB, 64 * MIB

# Tiles of the recomputing sweep, 4096 tokens by 2048 classes on a CPU: many tokens, for the weight gradient is summed
# over them inside one product. However few the tokens, a tile is an eighth of a large vocabulary at most.
TILE_ROWS, TILE_COLUMNS_FLOOR, TILE_COLUMNS_STEP, TILES_LEAST = 4096, 512, 64, 8
TILE_BYTES_CPU, TILE_BYTES_OTHER = 32 * MIB, 128 * MIB


def chunk_rows(tokens: int, vocab: int, itemsize: int, *, sum_bytes: int = 0) -> int:
    """Rows of logits held at a time: at most a measured best, within a byte budget, and balanced over the chunks.

    Args:
        tokens: rows in all.
        vocab: columns of the logits.
        itemsize: bytes of one logit.
        sum_bytes: what several chunks need beside the weight gradient that is returned, to sum it.
    """
    best = ROWS_WIDE if itemsize >= 4 else ROWS_NARROW
    rows = _balanced(tokens, max(ROWS_FLOOR, min(best, LOGITS_BYTES // (vocab * itemsize))))
    if rows < tokens <= ROWS_ALONE and (tokens - rows) * vocab * itemsize < sum_bytes:
        return tokens
    return rows


def tile_shape(tokens: int, vocab: int, itemsize: int, device_type: str) -> tuple[int, int]:
    """Rows and columns of the logits held at a time by a sweep over tokens and vocabulary; at least 1 and 1.

    Args:
        tokens: rows in all.
        vocab: columns in all.
        itemsize: bytes of one logit in the dtype of the losses.
        device_type: where.
    """
    rows = _balanced(tokens, TILE_ROWS)
    budget = (TILE_BYTES_CPU if device_type == "cpu" else TILE_BYTES_OTHER) // (rows * itemsize)
    most = max(1, min(budget, max(TILE_COLUMNS_FLOOR, vocab // TILES_LEAST)))
    # An odd row length keeps GPUs from their fast kernels.
    columns = -(-_balanced(vocab, most) // TILE_COLUMNS_STEP) * TILE_COLUMNS_STEP
    return rows, min(vocab, columns)


def block_rows(device_type: str, row_bytes: int) -> int:
    """Rows of fp32 (fp64) logits that elementwise work takes at a time; at least one."""
    return max(1, (BLOCK_BYTES_CPU if device_type == "cpu" else BLOCK_BYTES_OTHER) // max(1, row_bytes))


def slab_rows(device_type: str, row_bytes: int) -> int:
    """Rows of a product computed at a time where they must be converted to be summed; at least one."""
    return max(1, (SLAB_BYTES_CPU if device_type == "cpu" else SLAB_BYTES_OTHER) // max(1, row_bytes))


def spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of at most ``size`` that cover ``range(total)`` in order."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


def _balanced(total: int, most: int) -> int:
    """A piece of at most ``most``: 257 rows of 256 are two pieces of 129 and 128, for a last piece of 1 is overhead."""
    return max(1, -(-total // max(1, -(-total // most))))
