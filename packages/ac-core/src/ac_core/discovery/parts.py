"""Which part of a model a module belongs to: `language`, `vision`, `audio`, `connector`, or another tower by its name.

The signals, the strongest first; each is asked of the module, then of the modules around it, from the inside out:

1. its `config` object *is* a sub-config that the config of a module around it names;
2. a telling word in its name;
3. what it takes as input: the arguments of its forward, `main_input_name`, `input_modalities`;
4. where nothing on the path declares an input: the first layer, an embedding of tokens or filters over pixels.

`language` is what models a sequence of tokens, of text or of a codec (talkers, depth decoders, code predictors), and
everything that no signal speaks against. A `connector` (projector, resampler, Q-Former) carries the output of one part
to another; one that is built into a tower belongs to the tower.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from torch import nn

from ac_core.discovery.structure import arguments

LANGUAGE, VISION, AUDIO, CONNECTOR = "language", "vision", "audio", "connector"

# A word begins where the name does, after an underscore or a digit, or with a capital: there is no "text" in "context".
_WORD = r"(?:^|_|\d)(?:{})"
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORDS = tuple(
    (part, re.compile(_WORD.format(words)))
    for part, words in (
        (CONNECTOR, "proj(?:ection|ector)?$|projector|connector|merger|resampler|perceiver|q_?former|adapt[eo]r"),
        (AUDIO, "audio|speech|whisper|sound|wav|acoustic|codec|vocoder|mimi|(?:asr|mel)(?![a-z])"),
        (VISION, "vision|visual|image|img|vit(?![a-z])|pixel|video|siglip|clip|dino"),
        (LANGUAGE, "text|language|llm|lm(?![a-z])|thinker|talker"),
    )
)
_ROLE = re.compile(r"(?:encoder|global|local|model|backbone|_)*|\w*decoder")  # says what a tower does, not on what
_OTHER = "tokens of another kind"  # a protein's, say
_INPUTS = (
    (LANGUAGE, re.compile(r"(?:decoder_)?input_ids")),
    (AUDIO, re.compile(r"\w*input_(?:features|values)|audio_(?:values|mel)|spectrogram|waveform")),
    (VISION, re.compile(r"pixel_values\w*|flattened_patches")),
    (_OTHER, re.compile(r"\w+_input_ids")),
)
_MODALITIES = {"text": LANGUAGE, "image": VISION, "video": VISION}
_FIRST_LAYERS = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Step(NamedTuple):
    """A module on the way from the root to the one that is asked about, under the name it has in its parent."""

    name: str
    module: nn.Module


def part_of(model: nn.Module, name: str) -> str:
    """The part of `model` that the module or parameter called `name` belongs to."""
    path = _path(model, name)
    return _configured(path) or _named_on(path) or _declared(path) or _first_layer(path) or LANGUAGE


def _path(model: nn.Module, name: str) -> list[_Step]:
    path = [_Step("", model)]
    for word in filter(None, name.split(".")):
        module = path[-1].module._modules.get(word)
        if module is None:  # what is left of the name is a parameter's
            break
        path.append(_Step(word, module))
    return path


def _configured(path: list[_Step]) -> str | None:
    """Signal 1. A tower whose own name tells no part is another tower, unless it does nothing but model tokens."""
    names: dict[int, str] = {}
    seen: set[int] = set()
    towers = []
    for place, (attribute, module) in enumerate(path):
        config = getattr(module, "config", None)
        name = names.get(id(config))
        if name is None and config is None and attribute in names.values():
            name = attribute  # built from the config of this name, and does not keep it
        if name is not None:
            towers.append((place, name))
        names.update(_sub_configs(config, seen))
    towers.reverse()
    for _, name in towers:
        if (part := _telling(name)) is not None:
            return part
    for place, name in towers:
        reads = _declared(path[place:])
        if reads in (VISION, AUDIO):
            return reads
        if reads == LANGUAGE and (_ROLE.fullmatch(name) or _reads_text_alone(path[:place])):
            return LANGUAGE
        if not _ROLE.fullmatch(name):
            return name
    return None


def _sub_configs(config: object, seen: set[int]) -> Iterator[tuple[int, str]]:
    """`(id of the config object, its name)` for all that a Hugging Face config declares."""
    if id(config) in seen:
        return
    seen.add(id(config))
    for name in getattr(type(config), "sub_configs", None) or ():
        if (sub := getattr(config, name, None)) is not None:
            yield id(sub), name.removesuffix("_config")
            yield from _sub_configs(sub, seen)


def _named_on(path: list[_Step]) -> str | None:
    """Signal 2. A connector is one only where nothing around it names a tower, and never inside a list of layers."""
    prefixes = {getattr(module, "base_model_prefix", None) for _, module in path}
    connects = False
    for name, _ in reversed(path):
        if name in prefixes:  # Hugging Face's name for the whole model, such as "speecht5"
            continue
        part = _telling(name)
        if part not in (None, CONNECTOR):
            return part
        connects = (connects or part == CONNECTOR) and not name.isdigit()
    return CONNECTOR if connects else None


def _telling(name: str) -> str | None:
    """The part that a word in `name` stands for."""
    words = _CAPITAL.sub("_", name).lower()
    return next((part for part, known in _WORDS if known.search(words)), None)


def _declared(path: list[_Step]) -> str | None:
    """Signal 3: what the innermost module reads that says so; one that reads several kinds ends the search.

    The arguments of a forward come first: `main_input_name` and `input_modalities` are inherited, and what the encoder
    of a speech model says about itself so comes to be said by its decoder.
    """
    for inputs in (_arguments_of, _attributes_of):
        for place, (name, module) in reversed(list(enumerate(path))):
            kinds = inputs(module) - {_OTHER}
            if len(kinds) > 1:
                break
            if kinds == {LANGUAGE} and name == "encoder" and place:
                return _read_by_no_other(path[place - 1].module) or LANGUAGE
            if kinds:
                (kind,) = kinds
                return LANGUAGE if kind != LANGUAGE and _embeds_tokens(module) else kind
    return None


def _arguments_of(module: nn.Module) -> set[str]:
    return {kind for name in arguments(module) if (kind := _kind_of_input(name)) is not None}


def _attributes_of(module: nn.Module) -> set[str]:
    """What the attributes that Hugging Face has for it say; text is its default, and says nothing."""
    main = getattr(module, "main_input_name", None) or ()
    kinds = {_kind_of_input(name) for name in ((main,) if isinstance(main, str) else main)} & {VISION, AUDIO}
    if kinds:
        return {str(kind) for kind in kinds}
    declared = getattr(module, "input_modalities", None) or ()
    kinds = {_MODALITIES.get(m, m) for m in ((declared,) if isinstance(declared, str) else declared)}
    return set() if kinds == {LANGUAGE} else {str(kind) for kind in kinds}


def _reads_text_alone(path: list[_Step]) -> bool:
    return set().union(*(_arguments_of(module) for _, module in path)) == {LANGUAGE}


def _read_by_no_other(model: nn.Module) -> str | None:
    """What an encoder that could read tokens (T5's) is given instead, as embeddings: Pop2Piano's spectrograms."""
    left = _arguments_of(model) - {LANGUAGE}
    for child in model.children():
        left -= _arguments_of(child)
    return left.pop() if len(left) == 1 else None


def _kind_of_input(name: str) -> str | None:
    return next((kind for kind, names in _INPUTS if names.fullmatch(name)), None)


def _embeds_tokens(module: nn.Module) -> bool:
    """A text decoder of SpeechT5 calls its input `input_values`, and embeds it."""
    embeddings = getattr(module, "get_input_embeddings", None)
    try:
        return embeddings is not None and isinstance(embeddings(), nn.Embedding)
    except (AttributeError, NotImplementedError):  # what Hugging Face models without one raise
        return False


def _first_layer(path: list[_Step]) -> str | None:
    """Signal 4, for models that declare nothing."""
    if any(_arguments_of(module) or _attributes_of(module) for _, module in path):
        return None
    for _, module in reversed(path):
        near = islice(module.modules(), 50)  # what comes later is not where the input goes
        first = next((m for m in near if isinstance(m, _FIRST_LAYERS)), None)
        if isinstance(first, nn.Embedding):
            return LANGUAGE
        if isinstance(first, nn.Conv2d | nn.Conv3d):
            return VISION
    return None
