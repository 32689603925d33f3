"""The section of a recipe that names images. Loads without torch."""

from dataclasses import dataclass
from typing import Literal

from ac_recipes.section import Section, at_least


@dataclass(frozen=True, kw_only=True)
class DigitsDatasetConfig(Section):
    """Handwritten digits of scikit-learn (1,797 of 8 x 8 pixels), each with a few questions and their answers.

    An example is a conversation of one turn: the image, a question, an answer. The answer alone counts.

    sequence_length: tokens of an example, those that stand for the image included; a shorter one is padded.
    validation_fraction: share of the images that is held out and never trained on.
    """

    kind: Literal["digits"] = "digits"
    sequence_length: int = 32
    validation_fraction: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "sequence_length")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction: {self.validation_fraction!r} is not in [0, 1)")
