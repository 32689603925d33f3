"""Handwritten digits, and what is asked about them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ac_recipes.errors import UsageError
from ac_recipes.extras import install_extra

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

QUESTIONS: dict[str, Callable[[int], str]] = {
    "Which digit is this?": lambda digit: NAMES[digit],
    "Which digit comes next?": lambda digit: NAMES[(digit + 1) % 10],
    "Is the digit even or odd?": lambda digit: "odd" if digit % 2 else "even",
    "Is the digit greater than four?": lambda digit: "yes" if digit > 4 else "no",
}
"""Each question with its answer to a digit."""


@dataclass(frozen=True)
class Digits:
    """images: float32 `[n, 8, 8]` in [-1, 1], -1 where there is no ink; targets: int64 `[n]`, 0 to 9."""

    images: Tensor
    targets: Tensor

    @property
    def fingerprint(self) -> str:
        """SHA-256 over images, targets, questions and answers."""
        digest = hashlib.sha256(self.images.numpy().tobytes() + self.targets.numpy().tobytes())
        digest.update("\n".join(texts()).encode())
        return digest.hexdigest()


def read_digits() -> Digits:
    """The digits that scikit-learn carries: the test part of UCI's "Optical Recognition of Handwritten Digits".

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            "dataset.kind: 'digits' needs scikit-learn, which is not installed here; " + install_extra("images")
        ) from error
    found = load_digits()
    ink = torch.from_numpy(found.images).float()  # [n, 8, 8], 0 to 16
    return Digits(ink / 8 - 1, torch.from_numpy(found.target).long())


def texts() -> list[str]:
    """Every question with every answer, for a tokenizer that is to be trained on them."""
    return [text for question, answer in QUESTIONS.items() for digit in range(10) for text in (question, answer(digit))]
