"""Conversations about images as batches: tokens, with placeholders where the image is, and pixels."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ac_recipes.data.holdout import places_to_hold_out
from ac_recipes.errors import UsageError
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.images.digits import Digits
from ac_recipes.images.layout import ImageLayout
from ac_recipes.images.questions import QUESTIONS

IMAGE, USER, ASSISTANT = "<image>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (IMAGE, USER, ASSISTANT)
"""Tokens that a tokenizer for these conversations needs, besides one that ends a text."""


@dataclass(frozen=True, kw_only=True)
class ImageExamples:
    """Every question about every image; example `i` asks question `i % questions` about image `i // questions`.

    images: float32 `[images, 8, 8]`; input_ids, labels: int64 `[images, questions, sequence_length]`.
    Rows are padded at the right. Causal attention never looks from a real token to the padding behind it, so no
    attention mask is needed.
    """

    images: Tensor
    input_ids: Tensor
    labels: Tensor
    layout: ImageLayout

    def __len__(self) -> int:
        return self.input_ids.shape[0] * self.input_ids.shape[1]

    def __getitem__(self, ids: Tensor) -> dict[str, Tensor]:
        """`input_ids`, `labels`: int64 `[len(ids), sequence_length]`; `pixel_values`: float32
        `[len(ids), 1, channels, side, side]`, each pixel of a digit as a square of pixels, alike in all channels."""
        image, question = ids // self.input_ids.shape[1], ids % self.input_ids.shape[1]
        factor = self.layout.side // self.images.shape[-1]
        pixels = self.images[image].repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        return {
            "input_ids": self.input_ids[image, question],
            "labels": self.labels[image, question],
            "pixel_values": pixels[:, None, None].expand(-1, 1, self.layout.channels, -1, -1),
        }


def image_examples(
    digits: Digits,
    tokenizer: PreTrainedTokenizerBase,
    config: DigitsDatasetConfig,
    layout: ImageLayout,
    ignore_index: int,
) -> tuple[ImageExamples, ImageExamples]:
    """Those to train on, and those about the images that are held out.

    Raises:
        UsageError: a conversation is longer than `sequence_length`, or no image is left to train on.
    """
    kept, held_out = places_to_hold_out(len(digits.targets), config.validation_fraction, "images")
    # Ten digits make ten different answers to a question: each is encoded once.
    input_ids, labels = _encode(tokenizer, config.sequence_length, layout.tokens, ignore_index)

    def chosen(those: list[int]) -> ImageExamples:
        targets = digits.targets[those]
        return ImageExamples(
            images=digits.images[those], input_ids=input_ids[targets], labels=labels[targets], layout=layout
        )

    return chosen(kept), chosen(held_out)


def _encode(
    tokenizer: PreTrainedTokenizerBase, length: int, image_tokens: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Inputs and labels of every digit and question, int64 `[10, questions, length]`."""
    image, user, assistant = tokenizer.convert_tokens_to_ids([IMAGE, USER, ASSISTANT])
    end = tokenizer.eos_token_id
    input_ids = torch.full((10, len(QUESTIONS), length), end)
    labels = torch.full((10, len(QUESTIONS), length), ignore_index)
    for digit in range(10):
        for place, (question, answer) in enumerate(QUESTIONS.items()):
            prompt = [user, *[image] * image_tokens, *_ids(tokenizer, question), assistant]
            ids = [*prompt, *_ids(tokenizer, answer(digit)), end]
            if len(ids) - 1 > length:
                raise UsageError(
                    f"dataset.sequence_length: {length} is too short for '{question}' with its image, which takes "
                    f"{len(ids) - 1} tokens, {image_tokens} of them for the image"
                )
            input_ids[digit, place, : len(ids) - 1] = torch.tensor(ids[:-1])
            labels[digit, place, len(prompt) - 1 : len(ids) - 1] = torch.tensor(ids[len(prompt) :])
    return input_ids, labels


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
