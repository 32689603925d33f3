"""What the trainer asks for batches: any number of examples, taken by their indices, as named tensors."""

from typing import Protocol

from torch import Tensor


class Examples(Protocol):
    """Examples that can be batched, in an order that is the same in every process and every run."""

    def __len__(self) -> int: ...

    def __getitem__(self, ids: Tensor) -> dict[str, Tensor]:
        """The examples `ids` (int64), on the CPU, each tensor `[len(ids), ...]`.

        `labels`, int64 `[len(ids), sequence]`, are shifted already: label t is the token after input t, and the loss's
        ignore_index does not count. The model is called with all the others, by name.
        """
        ...
