"""How many tokens at a time. Integers only, so that memory can be reasoned about without running anything."""

from collections.abc import Iterator

MIB = 2**20

# Measured on CPU: fewer rows make the GEMMs slow (64 rows cost 20 %), more only cost memory. bf16 GEMMs are twice as
# fast, so they need twice the rows to hide the elementwise work and the weight gradient's accumulation.
ROWS_WIDE, ROWS_NARROW, ROWS_FLOOR = 256, 512, 128
LOGITS_BYTES = 128 * MIB

# Elementwise passes over a block, and slabs of the weight gradient, are worth keeping in a CPU's cache; a CPU also
# converts a whole operand before adding it to another dtype. Elsewhere bigger pieces mean fewer launches.
BLOCK_BYTES_CPU, BLOCK_BYTES_OTHER = 16 * MIB, 64 * MIB
SLAB_BYTES_CPU, SLAB_BYTES_OTHER = 8 * MIB, 64 * MIB


def chunk_rows(tokens: int, vocab: int, itemsize: int) -> int:
    """Rows of logits held at a time: at most a measured best, within a byte budget, and balanced over the chunks.

    Args:
        tokens: rows in all.
        vocab: columns of the logits.
        itemsize: bytes of one logit.
    """
    best = ROWS_WIDE if itemsize >= 4 else ROWS_NARROW
    most = max(ROWS_FLOOR, min(best, LOGITS_BYTES // (vocab * itemsize)))
    # 257 rows are two chunks of 129 and 128, not 256 and 1: the last chunk would be all overhead.
    return max(1, -(-tokens // max(1, -(-tokens // most))))


def block_rows(device_type: str, row_bytes: int) -> int:
    """Rows of fp32 (fp64) logits that elementwise work takes at a time; at least one."""
    return max(1, (BLOCK_BYTES_CPU if device_type == "cpu" else BLOCK_BYTES_OTHER) // max(1, row_bytes))


def slab_rows(device_type: str, row_bytes: int) -> int:
    """Rows of the weight gradient computed at a time where they must be converted to be summed; at least one."""
    return max(1, (SLAB_BYTES_CPU if device_type == "cpu" else SLAB_BYTES_OTHER) // max(1, row_bytes))


def spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of at most ``size`` that cover ``range(total)`` in order."""
    for start in range(0, total, size):
        yield start, min(start + size, total)
