"""Images, videos, spectrograms and waveforms in the shapes that the classes take, random and the same every time."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

BATCH = 2
TEXT = 32
WORDS = 64  # token ids from here on are words; the special tokens of the tiny configurations are below
SIDE = 32  # of an image, in pixels
GRID = (4, 4)  # of an image, in patches
FRAMES = 64  # of a spectrogram
SAMPLES = 1600  # of a waveform

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Medium:
    """A kind of input beside text. `type_id`: what it is called in `mm_token_type_ids`."""

    name: str
    type_id: int
    delimiters: str

    def token(self, config: PreTrainedConfig) -> int | None:
        """The token that stands for one row of features in the text."""
        return _first_int(config, f"{self.name}_token_id", f"{self.name}_token_index")

    def enclosed(self, config: PreTrainedConfig, placeholders: Tensor) -> Tensor:
        """The placeholders between the start and the end token, where the configuration has such tokens."""
        for edge, place in (("start", 0), ("end", 1)):
            names = (f"{self.name}_{edge}_token_id", f"{self.delimiters}_{edge}_token_id")
            token = _first_int(config, *names)
            if token is not None:
                column = torch.full((len(placeholders), 1), token)
                placeholders = torch.cat([placeholders, column] if place else [column, placeholders], dim=1)
        return placeholders


IMAGE, VIDEO, AUDIO = Medium("image", 1, "vision"), Medium("video", 2, "vision"), Medium("audio", 3, "audio")


def generic_media(config: PreTrainedConfig, parameters: list[str]) -> Inputs:
    """Images, videos and sound for the arguments that take them, in the most common shapes."""
    media: Inputs = {}
    vision = getattr(config, "vision_config", None) or config
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    if "pixel_values" in parameters:
        if "image_grid_thw" in parameters:
            media["pixel_values"], media["image_grid_thw"] = patches(vision)
        else:
            media["pixel_values"] = images(vision)
    if "pixel_values_videos" in parameters and "video_grid_thw" in parameters:
        media["pixel_values_videos"], media["video_grid_thw"] = patches(vision)
    if "input_features" in parameters:
        frames = 2 * (getattr(audio, "max_source_positions", None) or FRAMES // 2)
        media |= spectrogram(parameters, getattr(audio, "num_mel_bins", 16), frames)
    elif "input_values" in parameters:
        media |= waveform(parameters)
    return media


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def words(*shape: int, vocabulary: int = 160) -> Tensor:
    return torch.randint(WORDS, vocabulary, shape, generator=torch.Generator().manual_seed(sum(shape)))


def images(vision: PreTrainedConfig, *several: int) -> Tensor:
    """`[BATCH, *several, channels, side, side]`."""
    side = _square(getattr(vision, "image_size", None) or SIDE)
    return noise(BATCH, *several, _channels(vision), side, side)


def patches(vision: PreTrainedConfig) -> tuple[Tensor, Tensor]:
    """`[patches of the batch, channels * frames * height * width]` and their grids `[BATCH, 3]`."""
    side = _square(vision.patch_size)
    depth = _first_int(vision, "temporal_patch_size", "patch_temporal") or 1
    grids = torch.tensor([(1, *GRID)] * BATCH)
    return noise(int(grids.prod(1).sum()), _channels(vision) * depth * side * side), grids


def spectrogram(parameters: list[str], bins: int, frames: int = FRAMES, *, time_first: bool = False) -> Inputs:
    """`[BATCH, bins, frames]`, or the last two exchanged, and the mask over frames that the class takes."""
    media: Inputs = {"input_features": noise(BATCH, frames, bins) if time_first else noise(BATCH, bins, frames)}
    for mask in ("input_features_mask", "feature_attention_mask"):
        if mask in parameters:
            media[mask] = torch.ones(BATCH, frames, dtype=torch.long)
    return media


def waveform(parameters: list[str], *channels: int) -> Inputs:
    """`[BATCH, *channels, SAMPLES]`, and the mask that the class takes."""
    media: Inputs = {"input_values": noise(BATCH, *channels, SAMPLES)}
    if "padding_mask" in parameters:
        media["padding_mask"] = torch.ones(BATCH, SAMPLES, dtype=torch.bool)
    return media


def _first_int(config: PreTrainedConfig, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _channels(vision: PreTrainedConfig) -> int:
    return _first_int(vision, "num_channels", "in_channels") or 3


def _square(size: Any) -> int:
    return size if isinstance(size, int) else size[0]
