"""One training batch for any generation class: text, and for every tower that the class has something to look at.

What the arguments of a class are called says most of what they hold (`pixel_values` beside `image_grid_thw` are flat
patches, without it whole images), and the model itself says how many placeholder tokens its text needs: as many as
`get_image_features` returns rows. `families.py` has the classes for which that is not so.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tools.sweep.families import FAMILIES
from tools.sweep.media import AUDIO, BATCH, IMAGE, TEXT, VIDEO, Inputs, Medium, generic_media, words

IGNORED = -100  # what the losses of transformers leave out


def make_inputs(model: nn.Module) -> Inputs:
    """Keyword arguments for one training step of `model`, the same every time."""
    config = model.config
    parameters = list(inspect.signature(model.forward).parameters)
    media = FAMILIES.get(config.model_type, generic_media)(config, parameters)
    tokens = media.pop("tokens", None)
    if tokens is None:
        tokens = _count_tokens(model, media)
    inputs = _text(config, parameters, tokens) | media
    return {name: value for name, value in inputs.items() if value is not None}


def _text(config: PreTrainedConfig, parameters: list[str], tokens: list[tuple[Medium, int, int]]) -> Inputs:
    decoder = config.get_text_config(decoder=True)
    vocabulary = getattr(decoder, "vocab_size", None) or 160
    ids = words(BATCH, TEXT, vocabulary=vocabulary)
    types = torch.zeros_like(ids)
    for medium, token, count in tokens:
        placeholders = medium.enclosed(config, torch.full((BATCH, count), token))
        ids = torch.cat([ids[:, :2], placeholders, ids[:, 2:]], dim=1)
        types = torch.cat([types[:, :2], (placeholders == token) * medium.type_id, types[:, 2:]], dim=1)
    text = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(types > 0, IGNORED),
        "mm_token_type_ids": types,
        "token_type_ids": types if tokens else None,
    }
    if config.is_encoder_decoder:
        text["decoder_input_ids"] = words(BATCH, TEXT, vocabulary=vocabulary)
        text["labels"] = text["decoder_input_ids"].roll(-1, dims=1)
    if "input_ids" not in parameters:
        del text["attention_mask"]  # it would be that of another input
    return {name: value for name, value in text.items() if name in parameters}


def _count_tokens(model: nn.Module, media: Inputs) -> list[tuple[Medium, int, int]]:
    """Which placeholders the text needs, and how many in each of its rows."""
    tokens = []
    was_training = model.training
    model.eval()
    for medium in (IMAGE, VIDEO, AUDIO):
        token = medium.token(model.config)
        features = _method(model, f"get_{medium.name}_features")
        if token is None or features is None:
            continue
        accepted = inspect.signature(features).parameters
        given = {name: value for name, value in media.items() if name in accepted}
        if given:
            with torch.no_grad():
                tokens.append((medium, token, _rows(features(**given)) // BATCH))
    model.train(was_training)
    return tokens


def _method(model: nn.Module, name: str) -> Any:
    """A method of the base model inside the model, or of the model itself: the latter may hide arguments of it."""
    return getattr(getattr(model, "model", None), name, None) or getattr(model, name, None)


def _rows(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.numel() // features.shape[-1]
    if isinstance(features, list | tuple):
        return sum(_rows(part) for part in features)
    pooled = getattr(features, "pooler_output", None)
    return _rows(features.last_hidden_state if pooled is None else pooled)
