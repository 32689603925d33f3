"""Plain text: documents, and the token windows that are cut out of them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ac_core.sizes import counted
from ac_recipes.data.config import TextDatasetConfig
from ac_recipes.data.files import read_text
from ac_recipes.errors import UsageError

_MOST_NAMED = 3
"""Files that a message names."""


def read_documents(config: TextDatasetConfig) -> list[str]:
    """The documents that `dataset.text` names.

    Raises:
        UsageError: a file cannot be read or is not UTF-8.
    """
    if config.text == "pydoc_topics":
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    return [read_text(name) for name in config.text]


@dataclass(frozen=True)
class Windows:
    """Token windows, int64 `[sequences, sequence_length + 1]`: inputs are all but the last token, labels all but the
    first."""

    tokens: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, ids: Tensor) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 `[len(ids), sequence_length]`."""
        windows = self.tokens[ids]
        return {"input_ids": windows[:, :-1], "labels": windows[:, 1:].clone()}


def cut_windows(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, config: TextDatasetConfig, section: str = "dataset"
) -> Windows:
    """Join the documents with end-of-text tokens and cut windows that overlap by the one token that is predicted.

    Raises:
        UsageError: the text is shorter than one sequence.
    """
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    ids = [token for document in encoded for token in (*document, tokenizer.eos_token_id)]
    length = config.sequence_length
    if len(ids) <= length:
        source = config.text if isinstance(config.text, str) else ", ".join(config.text[:_MOST_NAMED])
        source += ", ..." * (not isinstance(config.text, str) and len(config.text) > _MOST_NAMED)
        raise UsageError(
            f"{section}.text: {source}: {counted(len(ids), 'token')}, too few for a training sequence of {length} "
            f"tokens; give more text or a smaller {section}.sequence_length"
        )
    return Windows(torch.tensor(ids).unfold(0, length + 1, length).contiguous())
