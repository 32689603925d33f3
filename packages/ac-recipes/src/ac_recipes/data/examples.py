"""What the trainer asks for batches: any number of examples, taken by their indices, as named tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ac_recipes.data.encode import Encoded


class Examples(Protocol):
    """Examples that can be batched. Labels are shifted already: label t is the token after input t."""

    def __len__(self) -> int: ...

    def __getitem__(self, ids: Tensor) -> dict[str, Tensor]:
        """`input_ids`, `labels` and whatever else the model's forward takes, on the CPU, each `[len(ids), ...]`."""
        ...


@dataclass(frozen=True)
class Shifted:
    """One example as the model sees it: inputs and labels, int64 `[tokens]`."""

    inputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, encoded: Encoded, ignore_index: int) -> "Shifted":
        """All but the last token as inputs; all but the first as labels, those that do not count replaced."""
        ids, counted = torch.tensor(encoded.ids), torch.tensor(encoded.counted)
        return cls(ids[:-1], ids[1:].masked_fill(~counted[1:], ignore_index))


@dataclass(frozen=True, kw_only=True)
class Padded:
    """One example a row, padded at the right.

    Causal attention never looks from a real token to the padding behind it, so no attention mask is needed.

    pad_to: length of every row; None: that of the longest example of the batch.
    """

    examples: Sequence[Shifted]
    pad_id: int
    ignore_index: int
    pad_to: int | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, ids: Tensor) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 `[len(ids), tokens]`."""
        chosen = [self.examples[i] for i in ids.tolist()]
        length = self.pad_to or max(len(example.inputs) for example in chosen)
        inputs = torch.full((len(chosen), length), self.pad_id)
        labels = torch.full((len(chosen), length), self.ignore_index)
        for row, example in enumerate(chosen):
            inputs[row, : len(example.inputs)] = example.inputs
            labels[row, : len(example.labels)] = example.labels
        return {"input_ids": inputs, "labels": labels}
