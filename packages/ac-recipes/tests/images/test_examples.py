"""Digits, questions and batches."""

import pytest
import torch

from ac_recipes.data.tokenizer import train_tokenizer
from ac_recipes.errors import UsageError
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.images.digits import Digits, read_digits
from ac_recipes.images.examples import IMAGE, SPECIAL_TOKENS, image_examples
from ac_recipes.images.layout import ImageLayout
from ac_recipes.images.questions import NAMES, QUESTIONS, texts

LAYOUT = ImageLayout(tokens=4, side=16, channels=3)


@pytest.fixture
def digits():
    targets = torch.arange(20) % 10
    return Digits(torch.linspace(-1, 1, 20 * 64).view(20, 8, 8), targets)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(texts(), 400, SPECIAL_TOKENS)


def test_the_digits_that_scikit_learn_carries():
    pytest.importorskip("sklearn")
    found = read_digits()
    assert found.images.shape == (1797, 8, 8)
    assert (found.images.min(), found.images.max()) == (-1, 1)
    assert sorted(found.targets.unique().tolist()) == list(range(10))
    assert found.fingerprint == read_digits().fingerprint != Digits(found.images, found.targets.flip(0)).fingerprint


def test_without_scikit_learn_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"needs scikit-learn, .*pip install .*ac-recipes\[images\]'"):
        read_digits()


def test_a_conversation_counts_its_answer_alone(digits, tokenizer):
    train, _ = image_examples(digits, tokenizer, DigitsDatasetConfig(validation_fraction=0.0), LAYOUT, -100)
    assert len(train) == 20 * len(QUESTIONS)
    batch = train[torch.arange(len(train))]
    for i, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        question, answer = list(QUESTIONS.items())[i % len(QUESTIONS)]
        assert (ids == tokenizer.convert_tokens_to_ids(IMAGE)).sum() == LAYOUT.tokens
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=True).startswith(question)
        counted = labels != -100
        assert tokenizer.decode(labels[counted].tolist(), skip_special_tokens=False) == (
            answer(int(digits.targets[i // len(QUESTIONS)])) + "<|endoftext|>"
        )
        # Shifted: what is counted stands one place earlier than in the inputs.
        where = counted.nonzero().flatten()
        assert torch.equal(labels[where[:-1]], ids[where[:-1] + 1])


def test_pixels_are_those_of_the_image_that_is_asked_about(digits, tokenizer):
    train, _ = image_examples(digits, tokenizer, DigitsDatasetConfig(validation_fraction=0.0), LAYOUT, -100)
    pixels = train[torch.tensor([0, len(QUESTIONS) * 7 + 1])]["pixel_values"]
    assert pixels.shape == (2, 1, 3, 16, 16)
    for channel in range(3):
        assert torch.equal(pixels[1, 0, channel, ::2, 1::2], digits.images[7])


def test_held_out_images_are_in_no_question_that_is_trained_on(digits, tokenizer):
    train, held_out = image_examples(digits, tokenizer, DigitsDatasetConfig(validation_fraction=0.2), LAYOUT, -100)
    assert (len(train.images), len(held_out.images)) == (16, 4)
    together = torch.cat([train.images, held_out.images]).flatten(1)
    assert len(together.unique(dim=0)) == 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_length": 8}, r"dataset\.sequence_length: 8 is too short for 'Which .*, 4 of them for the image"),
        ({"validation_fraction": 0.99}, r"dataset\.validation_fraction: of 20 images none is left"),
    ],
)
def test_what_leaves_nothing_to_train_on_is_refused(digits, tokenizer, fields, message):
    with pytest.raises(UsageError, match=message):
        image_examples(digits, tokenizer, DigitsDatasetConfig(**fields), LAYOUT, -100)


def test_every_answer_is_one_of_the_words(tokenizer):
    answers = {answer(digit) for answer in QUESTIONS.values() for digit in range(10)}
    assert answers == {*NAMES, "even", "odd", "yes", "no"}
    assert all(len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1 for word in answers)
