"""transformers' configuration classes read as text, against the classes themselves."""

import dataclasses

import pytest

from ac_recipes.config_source import activation_functions, architectures, source_of, source_of_part
from ac_recipes.model_fields import _may_be as may_be

SAMPLE = [
    "data2vec-text",  # a file with a name of its own
    "gemma3",  # parts
    "gemma3_text",  # two classes in one module
    "gpt-sw3",
    "gpt2",  # aliases
    "llama",
    "llava",  # parts whose classes it leaves open
    "maskformer-swin",
    "mixtral",
    "mpt",  # `sub_configs`
    "pe_video_encoder",  # a part of another module
    "qwen2_5_vl",
    "qwen3_moe",
    "smolvlm",
    "t5",
]


def test_the_activation_functions_are_those_of_transformers():
    from transformers.activations import ACT2FN

    assert list(activation_functions()) == list(ACT2FN)


def test_the_architectures_are_those_of_transformers():
    from transformers import CONFIG_MAPPING

    assert set(architectures()) == set(CONFIG_MAPPING)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_fields_and_aliases_are_those_of_the_class(model_type):
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    source = source_of(model_type)
    assert source.kind == architectures()[model_type] == kind.__name__
    assert set(source.fields) == {field.name for field in dataclasses.fields(kind)}
    assert source.aliases == dict(kind.attribute_map)
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING and not isinstance(field.default, tuple):
            assert may_be(source.fields[field.name], field.default), field.name


@pytest.mark.parametrize("model_type", SAMPLE)
def test_parts_are_those_of_the_class(model_type):
    from transformers import CONFIG_MAPPING, AutoConfig

    source, parts = source_of(model_type), CONFIG_MAPPING[model_type].sub_configs
    assert {name: part.kind or "AutoConfig" for name, part in source.parts.items()} == {
        name: kind.__name__ for name, kind in parts.items()
    }
    for name, kind in parts.items():
        if kind is AutoConfig:
            assert source.parts[name].model_type in architectures()
            continue
        its = source_of_part(source, kind.__name__)
        assert its is not None
        assert set(its.fields) == {field.name for field in dataclasses.fields(kind)}
