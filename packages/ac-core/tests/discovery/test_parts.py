"""Parts of real multimodal models, against labels made by hand; and the signals one by one on models made for it."""

import copy
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from ac_core import find_blocks

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
