"""Handwritten digits."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ac_recipes.errors import UsageError
from ac_recipes.extras import install_extra
from ac_recipes.images.questions import texts


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
