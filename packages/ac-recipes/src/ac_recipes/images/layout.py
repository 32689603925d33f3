"""How a vision-language model takes an image: its size, and how many tokens it stands for. Loads without torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.images.questions import least_tokens
from ac_recipes.model_class import reads_images
from ac_recipes.reader import Problem
from ac_recipes.recipe import Recipe

SIDE = 8
"""Pixels of a side of a digit."""

FAMILIES = ("smolvlm", "idefics3")
"""Models that images can be prepared for without the processor that their checkpoints come with."""


@dataclass(frozen=True)
class ImageLayout:
    """tokens: placeholders that one image takes; side, channels: of the picture that the model sees."""

    tokens: int
    side: int
    channels: int


def layout_of(config: Any) -> ImageLayout:
    """The layout of transformers' configuration `config` of one of `FAMILIES`.

    Their connector puts `scale_factor` x `scale_factor` patches together into one token.
    """
    vision = config.vision_config
    patches = vision.image_size // vision.patch_size
    return ImageLayout((patches // config.scale_factor) ** 2, vision.image_size, vision.num_channels)


def image_problems(recipe: Recipe, config: Any) -> Iterator[Problem]:
    """Why the images of `recipe` cannot be shown to the model that has transformers' configuration `config`, or why
    that model cannot do without. Imports transformers."""
    if not isinstance(recipe.dataset, DigitsDatasetConfig):
        # Which parts of it train all the same, with others frozen or adapters alone, is known when it is built.
        if recipe.peft is None and recipe.freeze_config is None and reads_images(config):
            yield no_images_for(config.model_type, recipe.dataset.kind)
        return
    yield from digits_problems(recipe, config.model_type)
    if config.model_type in FAMILIES:
        vision = config.vision_config
        yield from layout_problems(recipe, vision.image_size, vision.patch_size, config.scale_factor)


def no_images_for(model_type: str, kind: str) -> Problem:
    """The problem that a model that reads images is given data of a `kind` without."""
    return Problem(
        path=("model", "config", "model_type"),
        message=f"{model_type} reads images, and dataset.kind {kind!r} has none, so that its vision tower would get no "
        "gradient and never be trained; use dataset.kind 'digits', or train a language model",
    )


def digits_problems(recipe: Recipe, model_type: str) -> Iterator[Problem]:
    """Why digits cannot be shown to any model of this type, or not to one with these fields."""
    if model_type not in FAMILIES:
        yield Problem(
            path=("model", "config", "model_type"),
            message=f"dataset.kind 'digits' can be shown to {' and '.join(FAMILIES)}, not to {model_type}",
        )
    elif "image_token_id" in (recipe.model.config or {}):
        message = "the tokenizer of the run decides it; leave it out"
        yield Problem(path=("model", "config", "image_token_id"), message=message, at_key=True)


def layout_problems(recipe: Recipe, size: int, patch: int, scale: int) -> Iterator[Problem]:
    """Why digits do not fill images of `size` x `size` pixels, patches of `patch` pixels and tokens of `scale` x
    `scale` patches, or why a conversation about one is longer than the recipe allows."""
    path = ("model", "config", "vision_config")
    if not isinstance(size, int) or size < 1 or size % SIDE:
        yield Problem(path=(*path, "image_size"), message=f"{size} is not a multiple of {SIDE}, the side of a digit")
    elif not isinstance(patch, int) or patch < 1 or scale < 1 or size % (patch * scale):
        at = ("model", "config", "scale_factor") if scale < 1 or size % patch == 0 else (*path, "patch_size")
        yield Problem(
            path=at,
            message=f"patches of {patch} pixels, {scale} x {scale} of them to a token (scale_factor), do not fill an "
            f"image of {size} x {size} evenly",
        )
    elif not recipe.pretrained_names() and recipe.dataset.sequence_length < (
        least := least_tokens((size // patch // scale) ** 2)
    ):
        yield Problem(
            path=("dataset", "sequence_length"),
            message=f"{recipe.dataset.sequence_length} is too short for a question with its image, which take {least} "
            f"tokens at the least, {(size // patch // scale) ** 2} of them for the image; raise it",
        )
