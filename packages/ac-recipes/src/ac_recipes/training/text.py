"""From text to training sequences: documents, tokenizer, token windows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from ac_recipes.errors import UsageError
from ac_recipes.recipe import DatasetConfig
from ac_recipes.text_files import read_text

END_OF_TEXT = "<|endoftext|>"


def read_documents(config: DatasetConfig) -> list[str]:
    """The documents that `dataset.text` names.

    Raises:
        UsageError: a file cannot be read or is not UTF-8.
    """
    if config.text == "pydoc_topics":
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    return [read_text(name) for name in config.text]


def hash_of(documents: list[str]) -> str:
    """SHA-256 over the documents: a resumed run must find the text that it began with."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{len(document)}:".encode())
        digest.update(document.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def train_tokenizer(documents: list[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` entries, the end-of-text token and `special` among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


@dataclass(frozen=True)
class Windows:
    """Windows of a text.

    tokens: int64 `[windows, sequence_length + 1]`; inputs are all but the last token, labels all but the first.
    """

    tokens: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, ids: Tensor) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 `[len(ids), sequence_length]`."""
        windows = self.tokens[ids]
        return {"input_ids": windows[:, :-1], "labels": windows[:, 1:]}


def cut_sequences(documents: list[str], tokenizer: Tokenizer, config: DatasetConfig) -> tuple[Windows, Windows]:
    """Join the documents with end-of-text tokens, cut windows, hold some out: those to train on, those held out.

    Evenly spaced windows are held out rather than the last ones, so that both sides see every document's kind of text.

    Raises:
        UsageError: the text is shorter than one sequence.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [token for encoding in tokenizer.encode_batch(documents) for token in (*encoding.ids, end)]
    length = config.sequence_length
    count = (len(ids) - 1) // length
    held_out = round(count * config.validation_fraction)
    if count - held_out < 1:
        raise UsageError(
            f"dataset.text: {len(ids)} tokens are too few for a training sequence of {length} tokens; give more text "
            "or a smaller dataset.sequence_length"
        )
    windows = torch.tensor(ids).unfold(0, length + 1, length)
    is_held_out = torch.zeros(count, dtype=torch.bool)
    is_held_out[[(i + 1) * count // held_out - 1 for i in range(held_out)]] = True
    return Windows(windows[~is_held_out].contiguous()), Windows(windows[is_held_out].contiguous())
