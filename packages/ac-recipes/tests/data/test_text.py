"""Documents and windows."""

import pytest
import torch

from ac_recipes.data.config import TextDatasetConfig
from ac_recipes.data.text import cut_windows, read_documents
from ac_recipes.errors import UsageError


@pytest.fixture
def documents(text_file):
    return read_documents(TextDatasetConfig(text=(str(text_file), str(text_file))))


def test_the_text_that_python_carries():
    documents = read_documents(TextDatasetConfig())
    assert len(documents) > 50
    assert sum(map(len, documents)) > 300_000


def test_windows_overlap_by_the_one_token_that_is_predicted(documents, base_tokenizer):
    windows = cut_windows(documents, base_tokenizer, TextDatasetConfig(sequence_length=16))
    assert torch.equal(windows.tokens[:-1, -1], windows.tokens[1:, 0])
    assert base_tokenizer.eos_token_id in windows.tokens
    batch = windows[torch.tensor([2, 0])]
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {"input_ids": (2, 16), "labels": (2, 16)}
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert torch.equal(batch["input_ids"][1], windows.tokens[0, :-1])


def test_a_batch_can_be_changed_and_the_windows_stay(documents, base_tokenizer):
    windows = cut_windows(documents, base_tokenizer, TextDatasetConfig(sequence_length=16))
    before = windows.tokens.clone()
    windows[torch.tensor([0])]["labels"].fill_(-100)
    assert torch.equal(windows.tokens, before)


def test_text_that_is_too_short_is_refused(base_tokenizer):
    with pytest.raises(UsageError, match=r"dataset\.text: a, b, c, \.\.\.: \d+ tokens, too few .* 64 tokens"):
        cut_windows(["hello"], base_tokenizer, TextDatasetConfig(text=tuple("abcd"), sequence_length=64))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read .*nothing.txt: No such file"):
        read_documents(TextDatasetConfig(text=(str(tmp_path / "nothing.txt"),)))
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin.txt is not UTF-8 text \(byte 3\)"):
        read_documents(TextDatasetConfig(text=(str(tmp_path / "latin.txt"),)))
