"""transformers' configuration classes read as text, against the classes themselves."""

import dataclasses

import pytest

from ac_recipes.load import load_recipe
from ac_recipes.model_fields import _may_be as may_be
from ac_recipes.model_fields import _module_of as module_of
from ac_recipes.model_fields import architectures, config_source
from ac_recipes.reader import RecipeError, split_overrides

SAMPLE = [
    "data2vec-text",  # a file with a name of its own
    "gemma3",
    "gemma3_text",  # two classes in one module
    "gpt-sw3",
    "gpt2",  # aliases
    "llama",
    "maskformer-swin",
    "mixtral",
    "qwen2_5_vl",
    "qwen3_moe",
    "smolvlm",
    "t5",
]


def test_the_architectures_are_those_of_transformers():
    from transformers import CONFIG_MAPPING

    assert set(architectures()) == set(CONFIG_MAPPING)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_fields_and_aliases_are_those_of_the_class(model_type):
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    source = config_source(architectures()[model_type], module_of(model_type))
    assert architectures()[model_type] == kind.__name__
    assert set(source.fields) == {field.name for field in dataclasses.fields(kind)}
    assert source.aliases == dict(kind.attribute_map)
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING and not isinstance(field.default, tuple):
            assert may_be(source.fields[field.name], field.default), field.name


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        ("int", [1, True], ["1", 1.5, None, [1], {}]),
        ("float", [1, 1.5], ["x", None, [1.5]]),
        ("int | list[int] | None", [1, [1], None], ["x", 1.5, {}]),
        ("list[list[int]]", [[[1]]], [1]),
        ("list[list[int] | None]", [[[1]]], [1]),
        ("str | torch.dtype | None", ["x", 1, None], []),
        ("Literal['a', 'b'] | None", ["a", "c"], []),
        ("dict[str, int] | PreTrainedConfig", [{}, 1], []),
    ],
)
def test_what_a_field_may_hold(annotation, right, wrong):
    assert [value for value in right if not may_be(annotation, value)] == []
    assert [value for value in wrong if may_be(annotation, value)] == []


def check(file, *settings):
    _, overrides = split_overrides([f"--{setting}" for setting in settings])
    return load_recipe(str(file), overrides, quick=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.config.hiden_size=3", "model.config.hiden_size: unknown field of LlamaConfig; did you mean 'hidden"),
        ("model.config.model_type=lama", "transformers has no architecture 'lama'; did you mean 'llama'?"),
        ("model.config.hidden_size=wide", "model.config.hidden_size: expected int, got str (value: 'wide')"),
        ("model.config.hidden_size=33", "model.config: hidden_size 33 is not a multiple of num_attention_heads 4"),
        ("model.config={model_type: llama, hidden_size: 9}", "hidden_size 9 is not a multiple of num_attention_heads"),
        ("model.config.dtype=bfloat16", "model.config.dtype: set model.dtype instead"),
        ("model.config={model_type: gpt2, n_embd: 64, hidden_size: 32}", "'hidden_size' is another name of 'n_embd'"),
        ("model.config={model_type: gpt2, hidden_size: x}", "model.config.hidden_size: expected int, got str"),
        ("model.config.max_position_embeddings=8", "dataset.sequence_length: 16 tokens are more than the 8 positions"),
    ],
)
def test_what_is_found_without_transformers(tiny_file, setting, message):
    with pytest.raises(RecipeError) as caught:
        check(tiny_file, setting)
    assert message in str(caught.value)


@pytest.mark.parametrize("quick", [True, False])
def test_mistakes_in_the_configuration_are_told_beside_all_others_and_in_the_same_words(tiny_file, quick):
    tiny_file.write_text(
        tiny_file.read_text()
        .replace("intermediate_size", "intermediat_size")
        .replace("num_attention_heads: 4", "num_attention_heads: 5")
        .replace("vocab_size: 300", "vocab_sise: 300")
        .replace("local_batch_size: 2", "local_batch_size: two")
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tiny_file), split_overrides(["--rng.seed=x"])[1], quick=quick)
    told = [str(mistake).partition("tiny.yaml:")[2] or str(mistake) for mistake in caught.value.mistakes]
    assert [line.partition("; did")[0] for line in told] == [
        "3:5: model.config: hidden_size 32 is not a multiple of num_attention_heads 5",
        "5:5: model.config.intermediat_size: unknown field of LlamaConfig",
        "15:13: tokenizer.vocab_sise: unknown field",
        told[3],
        told[4],
    ]
    assert "step_scheduler.local_batch_size: expected" in told[3]
    assert "rng.seed: expected" in told[4]


@pytest.mark.parametrize("quick", [True, False])
def test_mistakes_in_the_configuration_and_in_the_data_are_told_together(tiny_file, quick):
    overrides = split_overrides(["--model.config.hiden_size=3", "--dataset.text=[gone.txt]"])[1]
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tiny_file), overrides, quick=quick)
    assert [mistake.path for mistake in caught.value.mistakes] == ["model.config.hiden_size", "dataset.text[0]"]


@pytest.mark.parametrize("setting", ["rope_theta=500000.0", "temperature=0.7", "rope_scaling={rope_type: default}"])
def test_what_transformers_takes_and_does_not_declare_is_no_mistake(tiny_file, setting):
    assert check(tiny_file, f"model.config.{setting}") == load_recipe(
        str(tiny_file), split_overrides([f"--model.config.{setting}"])[1]
    )


def test_without_transformers_installed_the_remedy_is_told(tiny_file, monkeypatch):
    from ac_recipes import model_fields
    from ac_recipes.errors import UsageError

    for cached in (model_fields.architectures, model_fields.config_source, model_fields._names_in_the_mappings):
        cached.cache_clear()
    model_fields._read.cache_clear()
    monkeypatch.setattr(model_fields, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="ac-recipes doctor"):
        check(tiny_file)
