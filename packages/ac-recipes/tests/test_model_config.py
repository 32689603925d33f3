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
    ("setting", "message"), [("hidden_size=wide", "expected int"), ("hidden_size=33", "not a multiple of")]
)
def test_what_transformers_itself_refuses(tiny_file, setting, message):
    assert message in mistakes(tiny_file, f"model.config.{setting}")


def test_older_spellings_that_transformers_translates_are_fine(tiny_file):
    _, overrides = split_overrides(["--model.config.rope_theta", "500000.0"])
    assert load_recipe(str(tiny_file), overrides).model.config["rope_theta"] == 500000.0
