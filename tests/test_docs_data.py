"""The recipes in the pages on data and recipes are right."""

import re
from pathlib import Path

import pytest

from ac_recipes.reader import read_recipe
from ac_recipes.recipe import Recipe

DOCS = Path(__file__).parents[1] / "docs"
SNIPPETS = [
    (page, snippet)
    for page in ("data.md", "recipes.md")
    for snippet in re.findall(r"^```yaml\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
]


def test_the_pages_have_snippets():
    assert {page for page, _ in SNIPPETS} == {"data.md", "recipes.md"}
    assert len(SNIPPETS) == 5


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_a_snippet_is_a_part_of_a_recipe(page, snippet):
    read_recipe(Recipe, page, text=f"model: {{config: {{model_type: llama}}}}\n{snippet}")
