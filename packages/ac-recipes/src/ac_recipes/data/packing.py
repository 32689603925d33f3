"""Several examples in one row, none of which sees another.

NOTE [ Packed rows ]
1. `position_ids` start again at 0 with every example of a row. That is all that says where one ends: without an
   attention mask, transformers sees the restarts and lets a token attend only within its own example.
2. Labels are shifted within each example before packing, so no label crosses a boundary.
3. What is left of a row is padding: an example of its own, without labels.
4. Not every model honours 1 (state-space and other recurrent layers do not). `check_packing` proves it of the model
   that is to be trained, with its own forward.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ac_recipes.data.examples import Shifted
from ac_recipes.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows of `size` tokens; `rows[i]` are the indices of the examples in row i."""

    examples: Sequence[Shifted]
    rows: Sequence[Sequence[int]]
    size: int
    pad_id: int
    ignore_index: int

    @classmethod
    def of(cls, examples: Sequence[Shifted], size: int, pad_id: int, ignore_index: int) -> "Packed":
        """Pack `examples`, none longer than `size`, into few rows."""
        rows = pack([len(example.inputs) for example in examples], size)
        return cls(examples=examples, rows=rows, size=size, pad_id=pad_id, ignore_index=ignore_index)

    @property
    def fill(self) -> float:
        """Share of the rows that is not padding."""
        return sum(len(example.inputs) for example in self.examples) / (self.size * len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, ids: Tensor) -> dict[str, Tensor]:
        """`input_ids`, `labels`, `position_ids`, int64 `[len(ids), size]`."""
        inputs = torch.full((len(ids), self.size), self.pad_id)
        labels = torch.full((len(ids), self.size), self.ignore_index)
        positions = torch.empty((len(ids), self.size), dtype=torch.int64)
        for row, index in enumerate(ids.tolist()):
            start = 0
            for example in (self.examples[i] for i in self.rows[index]):
                end = start + len(example.inputs)
                inputs[row, start:end] = example.inputs
                labels[row, start:end] = example.labels
                positions[row, start:end] = torch.arange(end - start)
                start = end
            positions[row, start:] = torch.arange(self.size - start)
        return {"input_ids": inputs, "labels": labels, "position_ids": positions}


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Share out items of these lengths among rows of `size`: best fit, the longest first; the same every time.

    Best-fit decreasing needs at most 11/9 of the fewest possible rows, plus one (Johnson, 1973).
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left in each row and the row, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[index], -1))
        if place == len(room):
            left, row = size, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(index)
        insort(room, (left - lengths[index], row))
    return rows


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Refuse a causal language model that lets one example of a packed row see another.

    It is run on four rows, which differ in the first example alone, or hold the second one by itself.

    Raises:
        UsageError: what it returns for the second example hangs on the first.
    """
    device = next(model.parameters()).device
    second = [3, 4, 5, 6]
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng():
            packed = model(
                input_ids=torch.tensor([[1, 2, 3, *second], [6, 5, 4, *second]], device=device),
                position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=device).expand(2, -1),
                use_cache=False,
            ).logits[:, 3:]
            alone = model(input_ids=torch.tensor([second], device=device), use_cache=False).logits
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(
            f"packed_sequence: {type(model).__name__} does not run on a packed row: {reason[:300]}"
        ) from error
    finally:
        model.train(was_training)
    tolerance = 32 * torch.finfo(packed.dtype).eps * alone.float().abs().max()
    if (packed.float() - alone.float()).abs().max() > tolerance:
        raise UsageError(
            f"packed_sequence: in {type(model).__name__} one example of a packed row sees another; set "
            "packed_sequence.packed_sequence_size to 0"
        )
