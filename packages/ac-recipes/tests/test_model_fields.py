"""`model.config` against the source of transformers' configuration classes."""

import pytest

from ac_recipes.config_source import architectures, source_of
from ac_recipes.load import load_recipe
from ac_recipes.model_fields import _may_be as may_be
from ac_recipes.model_sizes import pair_problems, value_problems
from ac_recipes.reader import RecipeError, fields_of, split_overrides
from ac_recipes.recipe import Recipe


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
        ("model.config.hidden_size=-64", "command line:1:1: model.config.hidden_size: -64 is not a whole"),
        ("model.config.num_attention_heads=0", "num_attention_heads: 0 is not a whole number of at least 1"),
        ("model.config.num_hidden_layers=0", "model.config.num_hidden_layers: 0 is not a whole number of at least 1"),
        ("model.config.num_key_value_heads=3", "command line:1:1: model.config: num_attention_heads 4 is not"),
        ("model.config={model_type: gpt2, n_layer: 0}", "model.config.n_layer: 0 is not a whole number of at least 1"),
        ("model.config.rms_norm_eps=-1", "model.config.rms_norm_eps: -1 is negative"),
        ("model.config.hidden_act=gellu", "transformers has no activation function 'gellu'; did you mean 'gelu'?"),
        ("model.config.hidden_act=step", "transformers has no activation function 'step'; it has gelu, "),
        (
            "model.config={model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 8}",
            "model.config: num_experts_per_tok 8 is more than num_experts 4",
        ),
        ("dataset={kind: digits}", "dataset.kind 'digits' can be shown to smolvlm and idefics3, not to llama"),
        ("distributed.activation_checkpointing_scope=vision", "scope: 'vision': Llama is a language model and has no"),
        ("distributed.activation_checkpointing={scope: [audio]}", "checkpointing.scope: 'audio': Llama is a language"),
        (
            "distributed.activation_checkpointing={policy: selective, save: [attention, router]}",
            "distributed.activation_checkpointing.save: 'router' matches no call of Llama, which has no experts; leave",
        ),
        ("distributed.ep_size=2", "distributed.ep_size: 2: Llama has no experts to share out; leave it at 1"),
        ("distributed.tp_size=3", "distributed.tp_size: 3 ranks cannot share out num_attention_heads 4 equally"),
        ("model.config.attention_dropout=1.5", "model.config.attention_dropout: 1.5 is no probability to drop: torch "),
        ("model.config.attention_dropout=-0.1", "-0.1 is no probability to drop: torch takes 0 or more, and less than"),
        ("model.config.attention_dropout=1", "model.config.attention_dropout: 1 is no probability to drop"),
        ("model.config={model_type: gpt2, resid_pdrop: 2}", "model.config.resid_pdrop: 2 is no probability to drop"),
        ("model.config={model_type: llava, text_config: {model_type: llama, attention_dropout: 2}}", "2 is no probab"),
        ("model.config={model_type: segformer, drop_path_rate: -1.0}", "drop_path_rate: -1.0 is no probability"),
        ("model.config.max_position_embeddings=8", "dataset.sequence_length: 16 tokens are more than the 8 positions"),
    ],
)
def test_what_is_found_without_transformers(tiny_file, setting, message):
    key, _, value = setting.partition("=")
    overrides = split_overrides([f"--{key}", value], fields_of(Recipe))[1]
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tiny_file), overrides, quick=True)
    assert message in str(caught.value)


def test_the_defaults_of_no_architecture_are_refused():
    for model_type in [*architectures()][::20]:
        source = source_of(model_type)
        told = [*value_problems(source, source.numbers, ()), *pair_problems(source, {}, (), source.numbers)]
        assert told == [], model_type


def test_a_probability_to_drop_may_be_right(tiny_file):
    recipe = check(tiny_file, "model.config.attention_dropout=0.999")
    assert recipe.model.config["attention_dropout"] == pytest.approx(0.999)


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
        "3:5: model.config: num_attention_heads 5 is not a multiple of num_key_value_heads 2",
        "5:5: model.config.intermediat_size: unknown field of LlamaConfig",
        "15:13: tokenizer.vocab_sise: unknown field",
        told[4],
        told[5],
    ]
    assert "step_scheduler.local_batch_size: expected" in told[4]
    assert "rng.seed: expected" in told[5]


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


NESTED = """\
model:
  config:
    model_type: {whole}
    vision_config:
      hidden_size: 32
      num_attention_heads: 4
    text_config:
      model_type: {language}
      {field}: {value}
"""


@pytest.fixture
def nested_file(tmp_path, text_file):
    """A vision-language model over text; what `check` has against the data is told only when the fields are right."""

    def write(whole="smolvlm", language="llama", field="hidden_size", value="64"):
        path = tmp_path / "nested.yaml"
        text = NESTED.format(whole=whole, language=language, field=field, value=value)
        path.write_text(f"{text}dataset: {{text: [{text_file}], sequence_length: 16}}\n")
        return path

    return write


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("recipe", "place", "message"),
    [
        ({"field": "hiden_size"}, "9:7", ".hiden_size: unknown field of LlamaConfig; did you mean 'hidden_size'?"),
        ({"value": "wide"}, "9:20", ".hidden_size: expected int, got str (value: 'wide')"),
        ({"language": "lama"}, "8:19", ".model_type: transformers has no architecture 'lama'; did you mean 'llama'?"),
        ({"language": "gpt2", "field": "num_key_value_heads"}, "9:7", ".num_key_value_heads: unknown field of GPT2"),
        ({"field": "dtype", "value": "bfloat16"}, "9:7", ".dtype: set model.dtype instead"),
        ({"value": "9\n      num_attention_heads: 4"}, "8:7", ": hidden_size 9 is not a multiple of num_att"),
    ],
)
def test_a_mistake_inside_a_nested_configuration_is_told_where_it_is(nested_file, quick, recipe, place, message):
    file = nested_file(**recipe)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(file), quick=quick)
    (told,) = str(caught.value).splitlines()
    assert told.startswith(f"{file}:{place}: model.config.text_config{message}")


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("whole", "setting", "message"),
    [
        ("smolvlm", "vision_config.hiden_size=3", ".hiden_size: unknown field of SmolVLMVisionConfig; did you mean 'h"),
        ("smolvlm", "vision_config=[3]", ": expected a mapping, got list (value: [3])"),
        ("smolvlm", "vision_config.model_type=3", ".model_type: expected str, got int (value: 3)"),
        ("smolvlm", "vision_config.model_type=vit", ".model_type: 'vit' would be ignored, as vision_config of Smol"),
        # the class of the whole says which it is, where no model_type does
        ("llava", "vision_config.hiden_size=3", ".hiden_size: unknown field of CLIPVisionConfig"),
    ],
)
def test_the_class_of_a_part_is_what_the_whole_says(nested_file, quick, whole, setting, message):
    _, overrides = split_overrides([f"--model.config.{setting}"])
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(nested_file(whole)), overrides, quick=quick)
    (told,) = str(caught.value).splitlines()
    assert told.startswith(f"command line:1:1: model.config.vision_config{message}")


def test_what_the_whole_gives_its_parts_is_no_mistake(nested_file):
    """LLaVA's vision tower is given a `vocab_size`, which its class does not have."""
    _, overrides = split_overrides(["--model.config.vision_config.vocab_size=32000"])
    assert load_recipe(str(nested_file(whole="llava")), overrides, quick=True).model.config is not None


def test_the_positions_of_a_nested_language_model_are_too_few(nested_file):
    with pytest.raises(RecipeError, match=r"than the 8 positions .* raise model\.config\.text_config\.max_pos"):
        check(nested_file(field="max_position_embeddings", value="8"))


def test_what_only_a_validator_of_a_part_knows_is_placed_at_the_part(nested_file):
    with pytest.raises(RecipeError, match=r":8:7: model\.config\.text_config: The `layer_types` "):
        load_recipe(str(nested_file(language="qwen3", field="layer_types", value="[odd]")))


def test_without_transformers_installed_the_remedy_is_told(tiny_file, monkeypatch):
    from ac_recipes import config_source
    from ac_recipes.errors import UsageError

    for cached in ("architectures", "config_source", "_names_in_the_mappings", "_parse", "_read"):
        getattr(config_source, cached).cache_clear()
    monkeypatch.setattr(config_source, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="ac-recipes doctor"):
        check(tiny_file)
