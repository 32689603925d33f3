"""Every word of other trainers leads to a field that a recipe has, and that no recipe calls so itself."""

import pytest

from ac_recipes.reader import homes_of, synonym_of, synonyms
from ac_recipes.recipe import Recipe


@pytest.mark.parametrize("field", synonyms.SYNONYMS)
def test_it_leads_to_a_field(field):
    assert homes_of(field, Recipe)
    for other in synonyms.SYNONYMS[field]:
        assert synonym_of(other.upper().replace("_", "-")) == field
        assert not homes_of(other, Recipe)


def test_another_word_is_no_synonym():
    assert synonym_of("lr") is None
    assert synonym_of("quux") is None
