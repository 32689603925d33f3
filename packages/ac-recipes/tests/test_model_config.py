"""The model section against transformers: what it would take silently is a mistake here."""

import pytest

from ac_recipes.load import load_recipe
from ac_recipes.reader import RecipeError, split_overrides


def mistakes(file, *settings):
    _, overrides = split_overrides([f"--{setting}" for setting in settings])
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(file), overrides)
    return str(caught.value)


def test_a_misspelt_field_is_found_where_it_stands(tiny_file):
    tiny_file.write_text(tiny_file.read_text().replace("hidden_size: 32", "hiden_size: 32"))
    expected = f"{tiny_file}:4:5: model.config.hiden_size: unknown field of LlamaConfig; did you mean 'hidden_size'?"
    assert mistakes(tiny_file) == expected


def test_an_unknown_architecture(tiny_file):
    assert "model.config.model_type: transformers has no architecture 'lama'; did you mean 'llama'?" in mistakes(
        tiny_file, "model.config.model_type=lama"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.config.hidden_size=wide", "model.config.hidden_size: expected int, got str"),
        ("model.config.hidden_size=33", "model.config: hidden_size 33 is not a multiple of num_attention_heads 4"),
        ("model.config.dtype=bfloat16", "model.config.dtype: set model.dtype instead"),
        ("model.config={model_type: gpt2, n_embd: 64, hidden_size: 32}", "'hidden_size' is another name of 'n_embd'"),
        ("model.config.max_position_embeddings=8", "dataset.sequence_length: 16 tokens are more than the 8 positions"),
        ("model.config.rms_norm_eps=1", "rms_norm_eps: expected float, got int (value: 1); write it with a point: 1.0"),
        ("dataset.text=[gone.txt]", "dataset.text[0]: cannot read gone.txt: No such file"),
    ],
)
def test_what_would_fail_or_mislead_later(tiny_file, setting, message):
    assert message in mistakes(tiny_file, setting)


def test_older_spellings_that_transformers_translates_are_fine(tiny_file):
    _, overrides = split_overrides(["--model.config.rope_theta", "500000.0"])
    assert load_recipe(str(tiny_file), overrides).model.config["rope_theta"] == 500000.0


def test_a_nested_mapping_is_left_as_the_recipe_has_it(tiny_file):
    _, overrides = split_overrides(["--model.config.rope_scaling", "{rope_type: default}"])
    assert load_recipe(str(tiny_file), overrides).model.config["rope_scaling"] == {"rope_type": "default"}
