"""What the trainer trains on: examples by number, a batch of them as named tensors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tokenizers import Tokenizer
from torch import Tensor

Batch = dict[str, Tensor]
"""One microbatch, each tensor `[examples, ...]`. `labels`, int64 `[examples, sequence]`, are shifted already: label t
is the token after input t, and -100 does not count. The model is called with all the others, by name."""


class Examples(ABC):
    """A fixed number of examples, in an order that is the same in every process and every run."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, ids: Tensor) -> Batch:
        """The examples `ids` (int64 `[examples]`), on the CPU."""


@dataclass(frozen=True)
class Prepared:
    """The data of a run.

    fingerprint: SHA-256 of what it was made from; a resumed run must find the same.
    """

    train: Examples
    validation: Examples
    tokenizer: Tokenizer
    fingerprint: str
