"""One training batch for any generation class: text, and for every tower that the class has something to look at.

What the arguments of a class are called says most of what they hold (`pixel_values` beside `image_grid_thw` are flat
patches, without it whole images), and the model itself says how many placeholder tokens its text needs: as many as
`get_image_features` returns rows. `families.py` has the classes for which that is not so.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2
TEXT = 24
WORDS = 64  # ids from here on are words; those below are the special tokens of the tiny configurations
GRID = (4, 4)
IGNORED = -100

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Medium:
    """A kind of input beside text: how the model names its features and the token that stands for one row of them."""

    name: str
    type_id: int  # in `mm_token_type_ids`

    @property
    def features(self) -> str:
        return f"get_{self.name}_features"


MEDIA = (Medium("image", 1), Medium("video", 2), Medium("audio", 3))


def make_inputs(model: nn.Module) -> Inputs:
    from tools.sweep.families import FAMILIES

    generator = torch.Generator().manual_seed(1)
    config = model.config
    parameters = list(inspect.signature(model.forward).parameters)
    family = FAMILIES.get(config.model_type)
    media = family(model, parameters) if family else generic_media(config, parameters)
    tokens = media.pop("tokens", None)
    if tokens is None:
        tokens = count_tokens(model, media)
    vocabulary = vocabulary_size(config)
    ids = torch.randint(WORDS, vocabulary, (BATCH, TEXT), generator=generator)
    types = torch.zeros_like(ids)
    for medium, token, count in tokens:
        placeholders = torch.full((BATCH, count), token)
        ids = torch.cat([ids[:, :2], placeholders, ids[:, 2:]], dim=1)
        types = torch.cat([types[:, :2], torch.full_like(placeholders, medium.type_id), types[:, 2:]], dim=1)
    labels = ids.masked_fill(types > 0, IGNORED)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    if "mm_token_type_ids" in parameters:
        text["mm_token_type_ids"] = types
    if "token_type_ids" in parameters and tokens:
        text["token_type_ids"] = types
    if "decoder_input_ids" in parameters:
        text["decoder_input_ids"] = torch.randint(WORDS, vocabulary, (BATCH, TEXT), generator=generator)
        text["labels"] = torch.randint(WORDS, vocabulary, (BATCH, TEXT), generator=generator)
        if model.main_input_name != "input_ids" and "input_ids" not in parameters:
            del text["input_ids"], text["attention_mask"]
    accepted = {n: v for n, v in text.items() if n in parameters}
    return accepted | media


def vocabulary_size(config) -> int:
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None) or 160


def token_of(config, medium: Medium) -> int | None:
    for name in (f"{medium.name}_token_id", f"{medium.name}_token_index"):
        if isinstance(token := getattr(config, name, None), int):
            return token
    return None


def count_tokens(model: nn.Module, media: Inputs) -> list[tuple[Medium, int, int]]:
    tokens = []
    for medium in MEDIA:
        features = getattr(model, medium.features, None) or getattr(getattr(model, "model", None), medium.features, None)
        token = token_of(model.config, medium)
        if features is None or token is None:
            continue
        allowed = inspect.signature(features).parameters
        if "args" in allowed:
            inner = getattr(model.model, medium.features)
            allowed = inspect.signature(inner).parameters
        given = {name: value for name, value in media.items() if name in allowed}
        if not given:
            continue
        was = model.training
        with torch.no_grad():
            model.eval()
            rows = count_rows(features(**given))
            model.train(was)
        tokens.append((medium, token, rows // BATCH))
    return tokens


def count_rows(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.numel() // features.shape[-1]
    if isinstance(features, list | tuple):
        return sum(count_rows(f) for f in features)
    pooled = getattr(features, "pooler_output", None)
    return count_rows(pooled if pooled is not None else features.last_hidden_state)


def generic_media(config, parameters: list[str]) -> Inputs:
    media: Inputs = {}
    vision = getattr(config, "vision_config", None) or config
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    if "pixel_values" in parameters:
        if "image_grid_thw" in parameters:
            media["pixel_values"], media["image_grid_thw"] = patches(vision, frames=1)
        else:
            media["pixel_values"] = images(vision)
            if "image_sizes" in parameters:
                media["image_sizes"] = torch.tensor([media["pixel_values"].shape[-2:]] * BATCH)
    if "pixel_values_videos" in parameters and "video_grid_thw" in parameters:
        media["pixel_values_videos"], media["video_grid_thw"] = patches(vision, frames=2)
    if "input_features" in parameters:
        mel = getattr(audio, "num_mel_bins", None) or 16
        media["input_features"] = noise(BATCH, mel, 2 * (getattr(audio, "max_source_positions", None) or 32))
        for mask in ("input_features_mask", "feature_attention_mask"):
            if mask in parameters:
                media[mask] = torch.ones(BATCH, media["input_features"].shape[-1], dtype=torch.long)
    if "input_values" in parameters:
        media["input_values"] = noise(BATCH, 3200)
    return media


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def square(size) -> int:
    return size if isinstance(size, int) else size[0]


def images(vision) -> Tensor:
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    side = square(getattr(vision, "image_size", None) or 32)
    return noise(BATCH, channels, side, side)


def patches(vision, frames: int) -> tuple[Tensor, Tensor]:
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    patch = square(getattr(vision, "patch_size", 8))
    temporal = square(getattr(vision, "temporal_patch_size", None) or 1)
    grid = torch.tensor([(frames, *GRID)] * BATCH)
    return noise(int(grid.prod(1).sum()), channels * temporal * patch * patch), grid
