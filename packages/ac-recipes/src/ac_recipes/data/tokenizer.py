"""The tokenizer of a run: pretrained, or trained here on the run's own text."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ac_recipes.data.files import read_text
from ac_recipes.errors import UsageError
from ac_recipes.pretrained import load_tokenizer

if TYPE_CHECKING:
    from ac_recipes.recipe import Recipe

END_OF_TEXT = "<|endoftext|>"


def pretrained_tokenizer(recipe: "Recipe") -> PreTrainedTokenizerBase | None:
    """The tokenizer that the recipe names, or that comes with its model; None where one is to be trained.

    Raises:
        UsageError: it cannot be had, or has no end-of-text token.
    """
    field, name = "tokenizer.pretrained_model_name_or_path", recipe.tokenizer.pretrained_model_name_or_path
    if name is None:
        field, name = "model.pretrained_model_name_or_path", recipe.model.pretrained_model_name_or_path
    if name is None:
        return None
    tokenizer = load_tokenizer(name, field)
    if tokenizer.eos_token_id is None:
        raise UsageError(f"{field}: the tokenizer of {name} has no end-of-text token (eos_token)")
    return tokenizer


def train_tokenizer(
    documents: list[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` entries, with the end-of-text token and `special_tokens`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return _wrap(tokenizer)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Keep the tokenizer in `folder`.

    Raises:
        OSError: it cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises nothing narrower, with the number in the words of Rust
        if (told := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(folder / "tokenizer.json")) from error


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that `save_tokenizer` has kept.

    Raises:
        UsageError: it is damaged.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises nothing narrower
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"--resume: {folder / 'tokenizer.json'} cannot be read: {reason}") from error


def with_template(tokenizer: PreTrainedTokenizerBase, file: str | None) -> PreTrainedTokenizerBase:
    """`tokenizer` with the chat template of `file` in place of its own, if there is a file.

    Raises:
        UsageError: the file cannot be read.
    """
    if file is not None:
        try:
            tokenizer.chat_template = read_text(file)
        except UsageError as error:
            raise UsageError(f"tokenizer.chat_template: {error}") from error
    return tokenizer


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
