"""Documents, tokenizer and windows."""

import pytest
import torch

from ac_recipes.errors import UsageError
from ac_recipes.recipe import DatasetConfig
from ac_recipes.training.text import END_OF_TEXT, cut_sequences, read_documents, train_tokenizer


@pytest.fixture
def documents(text_file):
    return read_documents(DatasetConfig(text=(str(text_file), str(text_file))))


def test_the_text_that_python_carries():
    documents = read_documents(DatasetConfig())
    assert len(documents) > 50
    assert sum(map(len, documents)) > 300_000


def test_a_tokenizer_gives_back_the_text_and_is_the_same_every_time(documents):
    tokenizer = train_tokenizer(documents, 300)
    assert tokenizer.decode(tokenizer.encode(documents[0]).ids) == documents[0]
    assert tokenizer.to_str() == train_tokenizer(documents, 300).to_str()
    assert 257 <= tokenizer.get_vocab_size() <= 300
    odd = "naïve \u2603 \x00"
    assert tokenizer.decode(tokenizer.encode(odd).ids) == odd


def test_windows_overlap_by_the_one_token_that_is_predicted(documents):
    tokenizer = train_tokenizer(documents, 300)
    train, held_out = cut_sequences(documents, tokenizer, DatasetConfig(sequence_length=16, validation_fraction=0.0))
    assert len(held_out) == 0
    batch = train[torch.arange(len(train))]
    assert batch["input_ids"].shape == batch["labels"].shape == (len(train), 16)
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
    assert torch.equal(batch["labels"][:-1, -1], batch["input_ids"][1:, 0])
    assert tokenizer.token_to_id(END_OF_TEXT) in batch["input_ids"]


def test_held_out_windows_are_not_trained_on(documents):
    tokenizer = train_tokenizer(documents, 300)
    whole = cut_sequences(documents, tokenizer, DatasetConfig(sequence_length=16, validation_fraction=0.0))[0]
    train, held_out = cut_sequences(documents, tokenizer, DatasetConfig(sequence_length=16, validation_fraction=0.1))
    assert len(held_out) == round(0.1 * len(whole))
    assert len(train) + len(held_out) == len(whole)


def test_text_that_is_too_short_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("hello")
    documents = ["hello"]
    with pytest.raises(UsageError, match=r"dataset\.text: \d+ tokens are too few .* 64 tokens"):
        cut_sequences(documents, train_tokenizer(documents, 300), DatasetConfig(sequence_length=64))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read .*nothing.txt: No such file"):
        read_documents(DatasetConfig(text=(str(tmp_path / "nothing.txt"),)))
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin.txt is not UTF-8 text \(byte 3\)"):
        read_documents(DatasetConfig(text=(str(tmp_path / "latin.txt"),)))
