"""Recipes are found by path or by shipped name."""

import pytest

from ac_recipes.errors import UsageError
from ac_recipes.load import load_recipe
from ac_recipes.shipped import find_recipe, shipped_names


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_recipe_is_right(name):
    load_recipe(name)


def test_a_path_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default").write_text("model: {}")
    assert find_recipe("default") == find_recipe("./default")


def test_what_is_not_there_names_what_is(tmp_path):
    with pytest.raises(UsageError, match="defalt is neither a file nor a shipped recipe; .*did you mean 'default'"):
        find_recipe("defalt")
    with pytest.raises(UsageError, match="the name of the recipe is empty; give a file, or one of default, "):
        find_recipe("")
    with pytest.raises(UsageError, match="is a folder"):
        find_recipe(str(tmp_path))
