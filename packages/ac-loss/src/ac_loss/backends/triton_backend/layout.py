"""How the work is cut, in integers only: what each part holds can be reasoned about without running anything."""

from collections.abc import Iterator
from dataclasses import dataclass

# A 128 x 128 tile of fp32 sums is 64 registers for each of 256 threads, and three stages of its operands fit in the
# shared memory of every GPU since Ampere.
BLOCK_ROWS, BLOCK_COLUMNS = 128, 128
BLOCK_WIDTH_BYTES = 128
STAGES, WARPS = 3, 8
GROUP = 8

# Programs for the statistics: several for each multiprocessor of a large GPU (H100: 132), so that the last to finish
# leave it idle for a short time only, and so few that what they write stays below a few MiB.
PROGRAMS = 1024

# Share of the gradients' elements that a block of logit gradients may have, and what its GEMMs need to be efficient.
SCRATCH_SHARE = 0.03
LEAST_COLUMNS, MOST_COLUMNS = 128, 8192

# Rows at a time where the weight is frozen: nothing is summed over rows then.
ROWS_WITHOUT_WEIGHT = 2048


def splits(tokens: int, vocab: int) -> tuple[int, int]:
    """Parts that the vocabulary is cut into for the statistics, and tiles in each."""
    tiles = -(-vocab // BLOCK_COLUMNS)
    wanted = max(1, PROGRAMS // -(-tokens // BLOCK_ROWS))
    each = -(-tiles // min(wanted, tiles))
    return -(-tiles // each), each


def block_width(hidden_size: int, itemsize: int) -> int:
    """Columns of the operands that a tile takes at a time; a power of two and at least 16, as ``tl.dot`` wants."""
    return min(BLOCK_WIDTH_BYTES // itemsize, max(16, 1 << (hidden_size - 1).bit_length()))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The order of a backward; see NOTE [ The unfilled gradient is the memory ].

    Attributes:
        tokens: rows that count.
        vocab: classes.
        rows: rows at a time.
        columns: classes at a time, a multiple of 128 unless they are all.
        kept: classes whose weight gradient is written while hidden's is summed. The others' storage holds that sum and
            is filled afterwards. Equal to ``vocab`` where the sum has memory of its own, or there is none.
    """

    tokens: int
    vocab: int
    rows: int
    columns: int
    kept: int

    @classmethod
    def make(
        cls,
        *,
        tokens: int,
        vocab: int,
        hidden_size: int,
        weight_itemsize: int,
        grad_hidden: bool,
        grad_weight: bool,
        elsewhere: bool,
    ) -> "Plan":
        """The plan for ``tokens`` rows that count; ``elsewhere`` if the weight's gradient goes into ``main_grad``."""
        rows = tokens if grad_weight else min(tokens, ROWS_WITHOUT_WEIGHT)
        elements = hidden_size * (vocab * grad_weight + tokens * grad_hidden)
        share = int(SCRATCH_SHARE * elements) // rows // LEAST_COLUMNS * LEAST_COLUMNS
        columns = min(max(share, LEAST_COLUMNS), MOST_COLUMNS)
        kept = vocab
        borrowed = -(-4 * tokens // weight_itemsize)
        if grad_hidden and grad_weight and not elsewhere and borrowed <= vocab:
            kept = (vocab - borrowed) // columns * columns
        return cls(tokens=tokens, vocab=vocab, rows=rows, columns=min(columns, vocab), kept=kept)

    @property
    def borrows(self) -> bool:
        """Whether hidden's gradient is summed in the storage of the weight's."""
        return self.kept < self.vocab


def spans(first: int, last: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` that cover ``range(first, last)`` in order."""
    for start in range(first, last, size):
        yield slice(start, min(start + size, last))
