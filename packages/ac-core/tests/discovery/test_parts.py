"""Parts of real multimodal models, against labels made by hand; and the signals one by one on models made for it."""

import copy
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import nn

from ac_core import find_blocks
from ac_core.discovery.parts import part_of

LABELS = tomllib.loads(Path(__file__).with_name("parts_of_towers.toml").read_text())
DEPTH = re.compile(r"(num_|n_)?((hidden|encoder|decoder)_)?layers?|depth")
KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")


def shrink(config, depth=4):
    """Leaves towers and their classes as they are, with few layers."""
    for name in dir(type(config)) + list(vars(config)):
        value = vars(config).get(name)
        if DEPTH.fullmatch(name) and type(value) is int and value > depth:
            setattr(config, name, depth)
        elif name in KINDS_OF_LAYERS and isinstance(value, list | tuple):
            setattr(config, name, list(value)[:depth])
    for name in type(config).sub_configs:
        if getattr(config, name, None) is not None:
            shrink(getattr(config, name), depth)
    return config


def build(transformers, name, fields):
    """The class with its default config and few layers, without weights; all layers where fewer are no valid model."""
    cls = getattr(transformers, name)
    config = cls.config_class(**fields)
    with torch.device("meta"):
        try:
            return cls._from_config(shrink(copy.deepcopy(config)))
        except (ImportError, ValueError, IndexError, KeyError):
            return cls._from_config(config)


@pytest.mark.parametrize("name", LABELS)
def test_every_block_is_of_the_part_that_a_reader_of_the_model_gives_it(name):
    transformers = pytest.importorskip("transformers")
    labels = dict(LABELS[name])
    model = build(transformers, name, labels.pop("config", {}))
    blocks = find_blocks(model)
    unlabelled = [b.name for b in blocks if not any(fnmatchcase(b.name, glob) for glob in labels)]
    unmatched = [glob for glob in labels if not any(fnmatchcase(b.name, glob) for b in blocks)]
    expected = {b.name: part for b in blocks for glob, part in reversed(labels.items()) if fnmatchcase(b.name, glob)}
    assert (unlabelled, unmatched) == ([], [])
    assert {b.name: b.part for b in blocks} == expected


def test_there_are_labels_for_many_multimodal_models():
    multimodal = [name for name, labels in LABELS.items() if len({v for v in labels.values() if type(v) is str}) > 1]
    assert len(multimodal) >= 60


class Config:
    """As Hugging Face's: `sub_configs` on the class, the sub-configs as attributes."""

    def __init__(self, **subs) -> None:
        self.__class__ = type("Config", (Config,), {"sub_configs": dict.fromkeys(subs)})
        self.__dict__.update(subs)


def module(_forward=None, _config=None, _prefix=None, _main=None, _modalities=None, **children):
    """A module whose forward has these arguments."""
    cls = type("Model", (nn.Module,), {"forward": _forward} if _forward else {})
    made = cls()
    declared = {"config": _config, "base_model_prefix": _prefix, "main_input_name": _main}
    declared["input_modalities"] = _modalities
    for name, value in declared.items():
        if value is not None:
            setattr(made, name, value)
    for name, child in children.items():
        made.add_module(name, child)
    return made


def tokens(self, input_ids=None, inputs_embeds=None): ...
def pixels(self, pixel_values): ...
def features(self, input_features): ...
def values(self, input_values): ...
def anything(self, hidden_states): ...
def everything(self, input_ids, pixel_values, input_features): ...


def layers():
    return nn.ModuleList([nn.Linear(2, 2)])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("vision_tower", "vision"), ("visual", "vision"), ("imageEncoder", "vision"), ("clip_model", "vision"),
        ("audio_tower", "audio"), ("speech_encoder", "audio"), ("code2wav", "audio"), ("asr_encoder", "audio"),
        ("text_model", "language"), ("llm", "language"), ("talker", "language"),
        ("multi_modal_projector", "connector"), ("vision_projection", "connector"), ("qformer", "connector"),
        ("audio_adapter", "connector"), ("perceiver_resampler", "connector"),
        ("context", "language"), ("eclipse", "language"), ("vital", "language"), ("project_in", "language"),
    ],
)  # fmt: skip
def test_words_in_names(name, part):
    assert part_of(module(**{name: module(layers=layers())}), f"{name}.layers.0") == part


def test_the_innermost_word_counts_but_a_connector_belongs_to_the_tower_around_it():
    root = module(
        vision_tower=module(text_adapter=module(layers=layers()), merger=layers()),
        clip=module(text_model=layers(), _prefix="clip"),
        layers=nn.ModuleList([module(adapter=layers())]),
    )
    assert part_of(root, "vision_tower.merger.0") == "vision"
    assert part_of(root, "clip.text_model.0") == "language"
    assert part_of(root, "layers.0.adapter.0") == "language", "a layer's own adapter joins no parts"


def test_the_name_of_the_whole_model_tells_nothing():
    root = module(_prefix="speecht5", speecht5=module(decoder=module(tokens, layers=layers())))
    assert part_of(root, "speecht5.decoder.layers.0") == "language"


def test_the_config_a_tower_was_built_from_comes_before_names():
    vision, protein, decoder, head = Config(), Config(), Config(), Config()
    root = module(
        everything,
        _config=Config(vision_config=vision, protein_config=protein, decoder_config=decoder, head_config=head),
        text_backbone=module(_config=vision, layers=layers()),
        encoder=module(tokens, _config=protein, layers=layers()),
        decoder=module(tokens, _config=decoder, layers=layers()),
        head=module(layers=layers()),
    )
    names = ("text_backbone", "encoder", "decoder", "head")
    assert [part_of(root, f"{name}.layers.0") for name in names] == ["vision", "protein", "language", "head"]
    wrapped = module(module=root)
    assert [part_of(wrapped, f"module.{name}.layers.0") for name in names[:2]] == ["vision", "protein"]


def test_a_model_of_tokens_alone_has_one_part():
    encoder, patcher = Config(), Config()
    root = module(
        tokens,
        _config=Config(encoder_config=encoder, patcher_config=patcher),
        encoder=module(tokens, _config=encoder, layers=layers()),
        patcher=module(tokens, _config=patcher, layers=layers()),
    )
    assert {part_of(root, f"{name}.layers.0") for name in ("encoder", "patcher")} == {"language"}


def test_what_the_nearest_model_reads():
    root = module(
        everything,
        sees=module(pixels, encoder=module(anything, layers=layers())),
        hears=module(anything, _main="input_features", layers=layers()),
        watches=module(anything, _modalities=("image", "video"), layers=layers()),
        waits=module(anything, _modalities="time", layers=layers()),
        reads=module(tokens, _main="input_features", layers=layers()),
        layers=layers(),
    )
    expected = {
        "sees.encoder": "vision", "hears": "audio", "watches": "vision", "waits": "time", "reads": "language",
    }  # fmt: skip
    assert {name: part_of(root, f"{name}.layers.0") for name in expected} == expected
    assert part_of(root, "layers.0") == "language"


def test_an_inherited_attribute_says_less_than_the_forward_around_it():
    inner = module(anything, _main="input_values", layers=layers())
    decoder = module(tokens, _main="input_values", inner=inner)
    assert part_of(module(everything, decoder=decoder), "decoder.inner.layers.0") == "language"


def test_values_that_are_embedded_are_tokens():
    decoder = module(values, layers=layers())
    assert part_of(module(everything, decoder=decoder), "decoder.layers.0") == "audio"
    type(decoder).get_input_embeddings = lambda self: nn.Embedding(2, 2)
    assert part_of(module(everything, decoder=decoder), "decoder.layers.0") == "language"


def test_an_encoder_of_embeddings_reads_what_nothing_else_in_its_model_does():
    def both(self, input_ids, input_features, decoder_input_ids): ...

    root = module(both, encoder=module(tokens, block=layers()), decoder=module(tokens, block=layers()))
    assert part_of(root, "encoder.block.0") == "audio"
    assert part_of(root, "decoder.block.0") == "language"
    root.tower = module(features)
    assert part_of(root, "encoder.block.0") == "language"


def test_the_first_layer_counts_where_nothing_is_declared():
    seeing = module(stem=nn.Conv2d(3, 4, 3), layers=layers(), head=nn.Embedding(2, 2))
    reading = module(embed=nn.Embedding(9, 4), layers=layers(), conv=nn.Conv2d(3, 4, 3))
    assert part_of(seeing, "layers.0") == "vision"
    assert part_of(reading, "layers.0") == "language"
    assert part_of(module(a=seeing, b=reading), "b.layers.0") == "language"
    assert part_of(module(everything, a=seeing), "a.layers.0") == "language"


def test_a_parameter_is_of_the_part_of_its_module():
    root = module(vision_tower=module(layers=layers()), layers=layers())
    assert part_of(root, "vision_tower.layers.0.weight") == "vision"
    assert part_of(root, "layers.0.weight") == "language"
