"""Inputs of the model types that take something else than `media.generic_media` makes, as a table.

A maker gets the configuration and the names of the forward's arguments. It may say how many placeholders the text
needs (`tokens`), where the model has no method that tells, and replace arguments of the text; None leaves one out.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

from tools.sweep.media import (
    AUDIO,
    BATCH,
    FRAMES,
    GRID,
    IMAGE,
    SAMPLES,
    SIDE,
    TEXT,
    Inputs,
    generic_media,
    images,
    noise,
    patches,
    spectrogram,
    waveform,
    words,
)

Maker = Callable[[PreTrainedConfig, list[str]], Inputs]
COUNT = GRID[0] * GRID[1]


def _tiles(count: int, **fixed: object) -> Maker:
    """Several images a row of text: `[BATCH, count, channels, side, side]`."""
    return lambda config, _: {"pixel_values": images(config.vision_config, count), **fixed}


def _anyres(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """A view of the whole image and one tile of it."""
    return {"pixel_values": images(config.vision_config, 2), "image_sizes": torch.tensor([[SIDE, SIDE]] * BATCH)}


def _pixtral(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """Images that may have any size, and their sizes."""
    pixels = images(config.vision_config)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([pixels.shape[-2:]] * BATCH)}


def _image_grid_only(config: PreTrainedConfig, parameters: list[str]) -> Inputs:
    """For classes whose images and videos share a placeholder: they take one of them at a time."""
    return generic_media(config, [name for name in parameters if "video" not in name])


def _square_patches(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """`[patches of the batch, channels, height, width]`."""
    pixels, grids = patches(config.vision_config)
    side = config.vision_config.patch_size
    return {"pixel_values": pixels.view(len(pixels), 3, side, side), "image_grid_thw": grids}


def _merged_patches(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """`[merged patches, height, width, channels]`, the grid counted in merged patches."""
    side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    grids = torch.tensor([(1, *GRID)] * BATCH)
    return {"pixel_values": noise(BATCH * COUNT, side, side, 3), "image_grid_thw": grids}


def _packed_patches(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """Every patch of the batch in one row: `[1, channels, height, patches * width]`."""
    side = config.vision_config.patch_size
    return {
        "pixel_values": noise(1, 3, side, BATCH * COUNT * side),
        "target_sizes": torch.tensor([GRID] * BATCH, dtype=torch.int32),
    }


def _naflex(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """Flat patches of every image in a row of its own, with a mask: `[BATCH, patches, channels * height * width]`."""
    side = config.vision_config.patch_size
    return {
        "pixel_values": noise(BATCH, COUNT, 3 * side * side),
        "spatial_shapes": torch.tensor([GRID] * BATCH),
        "pixel_attention_mask": torch.ones(BATCH, COUNT, dtype=torch.long),
    }


def _flattened(values: int) -> Inputs:
    """Patches that carry their row and column in front: `[BATCH, patches, 2 + channels * height * width]`."""
    rows, columns = torch.meshgrid(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], dim=-1).expand(BATCH, COUNT, 2)
    return {"flattened_patches": torch.cat([places, noise(BATCH, COUNT, values)], dim=-1)}


def _latents_in_text(count: int) -> torch.Tensor:
    """Where in the text the features of an image take the place of words."""
    mask = torch.zeros(BATCH, TEXT, dtype=torch.long)
    mask[:, 1 : 1 + count] = 1
    return mask


def _kosmos2(config: PreTrainedConfig, _: list[str]) -> Inputs:
    return {
        "pixel_values": images(config.vision_config),
        "image_embeds_position_mask": _latents_in_text(config.latent_query_num),
    }


def _kosmos2_5(config: PreTrainedConfig, _: list[str]) -> Inputs:
    return _flattened(config.vision_config.patch_embed_hidden_size) | {
        "image_embeds_position_mask": _latents_in_text(config.latent_query_num)
    }


def _mllama(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """Images in tiles, which the text sees through cross attention."""
    tiles = config.vision_config.max_num_tiles
    return {
        "pixel_values": images(config.vision_config, 1, tiles),
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(BATCH, TEXT, 1, tiles, dtype=torch.long),
    }


def _gemma4(config: PreTrainedConfig, parameters: list[str]) -> Inputs:
    side, pooled = config.vision_config.patch_size, config.vision_config.pooling_kernel_size
    edge = 2 * pooled
    places = torch.stack(torch.meshgrid(torch.arange(edge), torch.arange(edge), indexing="xy"), dim=-1)
    media = spectrogram(parameters, 128, time_first=True)
    media["input_features_mask"] = media["input_features_mask"].bool()
    return media | {
        "pixel_values": noise(BATCH, edge * edge, 3 * side * side),
        "image_position_ids": places.view(1, -1, 2).expand(BATCH, -1, 2),
    }


def _gemma4_unified(config: PreTrainedConfig, _: list[str]) -> Inputs:
    vision, audio = config.vision_config, config.audio_config
    side = vision.patch_size * vision.pooling_kernel_size
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), dim=-1)
    return {
        "pixel_values": noise(BATCH, COUNT, 3 * side * side),
        "image_position_ids": places.view(1, -1, 2).expand(BATCH, -1, 2),
        "input_features": noise(BATCH, 8, audio.audio_embed_dim),
        "input_features_mask": torch.ones(BATCH, 8, dtype=torch.bool),
    }


def _nemotron_omni(config: PreTrainedConfig, parameters: list[str]) -> Inputs:
    side = config.vision_config.patch_size
    return spectrogram(parameters, config.audio_config.num_mel_bins, time_first=True) | {
        "pixel_values": noise(BATCH * COUNT, 3 * side * side),
        "image_grid_hw": torch.tensor([GRID] * BATCH),
    }


def _dots3_note(config: PreTrainedConfig, parameters: list[str]) -> Inputs:
    audio = config.audio_config
    return generic_media(config, parameters) | {
        "input_features": noise(BATCH, audio.feature_size, FRAMES),
        "chunk_sample_lengths": torch.tensor([FRAMES * audio.hop_length] * BATCH),
    }


def _pi0(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """A robot's policy: what it sees, its state and the actions that it learns."""
    return {
        "pixel_values": images(config.vlm_config.vision_config, 1),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "state": noise(BATCH, config.max_state_dim),
        "actions": noise(BATCH, config.chunk_size, config.max_action_dim),
        "tokens": [(IMAGE, config.vlm_config.image_token_index, COUNT)],
    }


def _phi4(config: PreTrainedConfig, _: list[str]) -> Inputs:
    vision, audio = config.vision_config, config.audio_config
    edge = vision.crop_size // vision.patch_size
    half = edge // 2
    count = 2 * half * (half + 1) + 1  # the whole image and one crop, a separator a line and one between them
    heard = FRAMES // audio.time_reduction
    return {
        "image_pixel_values": images(vision, 2),
        "image_sizes": torch.tensor([[vision.crop_size] * 2] * BATCH),
        "image_attention_mask": torch.ones(BATCH, 2, edge, edge, dtype=torch.long),
        "audio_input_features": noise(BATCH, FRAMES, audio.input_size),
        "audio_embed_sizes": torch.tensor([heard] * BATCH),
        "tokens": [(IMAGE, vision.image_token_id, count), (AUDIO, audio.audio_token_id, heard)],
    }


def _instruct(*frames: int) -> Maker:
    """Images or videos, and the question that the Q-Former reads as well."""
    return lambda config, _: {
        "pixel_values": images(config.vision_config, *frames),
        "qformer_input_ids": words(BATCH, 8),
        "qformer_attention_mask": torch.ones(BATCH, 8, dtype=torch.long),
    }


def _udop(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """A page, and where each word stands on it."""
    corner = torch.linspace(0.0, 0.8, TEXT)
    box = torch.stack([corner, corner, corner + 0.1, corner + 0.1], dim=-1)
    return {"pixel_values": images(config), "bbox": box.expand(BATCH, TEXT, 4)}


def _two_strides(config: PreTrainedConfig, parameters: list[str]) -> Inputs:
    """Sound of which a convolution and a pooling leave a quarter of the frames."""
    media = generic_media(config, parameters)
    return media | {"tokens": [(AUDIO, AUDIO.token(config), media["input_features"].shape[-1] // 4)]}


def _codebooks(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """Sound as codes, several at a time: the codebooks are rows of the batch."""
    return {
        "input_ids": words(BATCH * config.num_codebooks, TEXT),
        "attention_mask": None,
        "labels": words(BATCH, TEXT, config.num_codebooks),
    }


def _seamless(config: PreTrainedConfig, parameters: list[str]) -> Inputs:
    if "input_features" not in parameters:
        return {}
    return spectrogram([], config.feature_projection_input_dim, time_first=True) | {"attention_mask": None}


def _time_first(bins: Callable[[PreTrainedConfig], int], frames: int = FRAMES) -> Maker:
    return lambda config, parameters: spectrogram(parameters, bins(config), frames, time_first=True)


def _videos(frames: int) -> Maker:
    """Images, and videos as `[BATCH, frames, channels, side, side]`."""
    return lambda config, _: {
        "pixel_values": images(config.vision_config),
        "pixel_values_videos": images(config.vision_config, frames),
    }


def _molmo2(config: PreTrainedConfig, _: list[str]) -> Inputs:
    # Every token pools four patches of one crop of its row.
    side = config.vision_config.patch_size
    pooled = torch.arange(BATCH * COUNT).view(-1, 4)
    return {
        "pixel_values": noise(BATCH, COUNT, 3 * side * side),
        "image_token_pooling": pooled,
        "image_grids": torch.tensor([(1, 2, 1, 2)] * BATCH),
        "image_num_crops": torch.ones(BATCH, dtype=torch.long),
        "tokens": [(IMAGE, config.image_patch_id, COUNT // 4)],
    }


def _assistant(config: PreTrainedConfig, _: list[str]) -> Inputs:
    """A draft model: it reads the keys and values of another model."""
    text = config.text_config
    states = (noise(BATCH, text.num_key_value_heads, TEXT, text.head_dim),) * 2
    return {
        "input_ids": None,
        "inputs_embeds": noise(BATCH, TEXT, 2 * config.backbone_hidden_size),
        "position_ids": torch.arange(TEXT).expand(BATCH, TEXT),
        "shared_kv_states": {"full_attention": states, "sliding_attention": states},
    }


FAMILIES: dict[str, Maker] = {
    # Images
    "apertus1p5": lambda c, p: _pixtral(c, p) | waveform(p),
    "deepseek_vl_hybrid": lambda c, _: {
        "pixel_values": images(c.vision_config),
        "high_res_pixel_values": images(c.high_res_vision_config),
    },
    "dots3_note": _dots3_note,
    "emu3": lambda c, _: {"pixel_values": images(c.vq_config), "image_sizes": torch.tensor([[SIDE, SIDE]] * BATCH)},
    "ernie4_5_vl_moe": _image_grid_only,
    "evolla": lambda _, __: {
        "protein_input_ids": words(BATCH, 16),
        "protein_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
    },
    "fuyu": lambda c, _: {
        "pixel_values": noise(BATCH, COUNT, 3 * c.patch_size**2),
        "tokens": [(IMAGE, c.image_token_id, COUNT)],
    },
    "gemma4": _gemma4,
    "gemma4_assistant": _assistant,
    "gemma4_unified": _gemma4_unified,
    "gemma4_unified_assistant": _assistant,
    "glm46v": _image_grid_only,
    "glm4v": _image_grid_only,
    "glm4v_moe": _image_grid_only,
    "glm5_next": _image_grid_only,
    "glm_ocr": _image_grid_only,
    "granite4_vision": lambda c, p: _anyres(c, p) | {"tokens": [(IMAGE, c.image_token_index, 10)]},
    "granite_docling": _tiles(1, pixel_attention_mask=torch.ones(BATCH, 1, dtype=torch.bool)),
    "idefics": _tiles(1, image_attention_mask=torch.ones(BATCH, TEXT, 1, dtype=torch.long)),
    "idefics2": _tiles(1),
    "idefics3": _tiles(1),
    "inkling2": _merged_patches,
    "inkling2_loop": _merged_patches,
    "instructblip": _instruct(),
    "instructblipvideo": _instruct(4),
    "kimi_k25": _square_patches,
    "kosmos-2": _kosmos2,
    "kosmos-2.5": _kosmos2_5,
    "lfm2_vl": _naflex,
    "lighton_ocr": _pixtral,
    "llava_next": _anyres,
    "llava_next_video": lambda c, p: _anyres(c, p) | {"pixel_values_videos": images(c.vision_config, 4)},
    "llava_onevision": _anyres,
    "minicpm_ocr": _packed_patches,
    "minicpmv4_6": _packed_patches,
    "minicpmv4_7": _packed_patches,
    "mistral3": _pixtral,
    "mistral_large4": _pixtral,
    "mllama": _mllama,
    "molmo2": _molmo2,
    "muse_spark": lambda c, p: generic_media(c, p) | {"input_values": noise(BATCH, 3840)},
    "nemotron_h_omni": _nemotron_omni,
    "paddleocr_vl": _square_patches,
    "phi4_multimodal": _phi4,
    "pi0": _pi0,
    "pix2struct": lambda c, _: _flattened(c.vision_config.patch_embed_hidden_size),
    "qwen2_5_omni_thinker": _image_grid_only,
    "qwen3_omni_moe_thinker": lambda c, p: _image_grid_only(c, p) | spectrogram(p, c.audio_config.num_mel_bins, 200),
    "smolvlm": _tiles(1),
    "udop": _udop,
    "video_llama_3": lambda c, p: _image_grid_only(c, p) | {"image_merge_sizes": torch.ones(BATCH, dtype=torch.long)},
    "video_llava": _videos(8),
    # Sound
    "canary": _time_first(lambda c: c.encoder_config.num_mel_bins),
    "cohere_asr": _time_first(lambda c: c.encoder_config.num_mel_bins),
    "dia": lambda c, _: {
        "decoder_input_ids": words(BATCH, TEXT, c.decoder_config.num_channels),
        "labels": words(BATCH * c.decoder_config.num_channels, TEXT),
    },
    "fun_asr_nano": _time_first(lambda c: c.audio_config.num_mel_bins * c.audio_config.num_stacked_frames, 16),
    "granite_speech": lambda c, _: spectrogram([], c.encoder_config.input_dim, 60, time_first=True),
    "granite_speech_plus": lambda c, _: spectrogram([], c.encoder_config.input_dim, 60, time_first=True),
    "kyutai_speech_to_text": lambda c, _: {"input_ids": words(BATCH, TEXT, c.num_codebooks + 1)},
    "moss_transcribe_diarize": lambda c, p: generic_media(c, p) | {"padding_mask": torch.ones(BATCH, SAMPLES)},
    "musicflamingo": _two_strides,
    "musicgen_decoder": _codebooks,
    "musicgen_melody_decoder": _codebooks,
    "nemo_speechlm": _time_first(lambda c: c.audio_config.asr_config.num_mel_bins),
    "omniasr": lambda _, p: waveform(p, 1),
    "pop2piano": lambda c, p: spectrogram(p, c.d_model, time_first=True) | {"input_ids": None},
    "qwen2_audio": _two_strides,
    "qwen3_asr": lambda c, p: spectrogram(p, c.audio_config.num_mel_bins, 200),
    "seamless_m4t": _seamless,
    "seamless_m4t_v2": _seamless,
    "speech-encoder-decoder": lambda _, p: waveform(p),
    "speech_to_text": _time_first(lambda c: c.input_feat_per_channel),
    "vibevoice": lambda _, p: waveform(p, 1),
    "vibevoice_asr": lambda _, p: waveform(p, 1),
    "voxtral_realtime": lambda c, p: spectrogram(p, c.audio_config.num_mel_bins, TEXT * 8) | {"tokens": []},
}
