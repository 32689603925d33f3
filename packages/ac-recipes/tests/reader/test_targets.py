"""Names of code are mistakes wherever they stand. That known ones can be translated is `tests/automodel`'s."""

from dataclasses import replace

import pytest

from ac_recipes.reader import RecipeError, read_recipe

REFUSED = "a recipe is data and imports nothing; '_target_: {}' is not a known name"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("os.getpid", "os.getpid"),
        ("builtins.exec", "builtins.exec"),
        ("'torch.optim'", "torch.optim"),
        ("[os, getpid]", "..."),
        ("", ""),
    ],
)
def test_any_other_name_is_refused(mistakes, written, shown):
    (line,) = mistakes(f"model: a\noptimizer:\n  _target_: {written}\n")
    assert line.partition(": ")[2] == f"optimizer._target_: {REFUSED.format(shown)}"


def test_the_rest_of_the_mapping_is_checked_but_nothing_is_missing_from_it(mistakes):
    assert mistakes("model: a\nlayers:\n- _target_: Layer\n  nmae: 3\n") == [
        f"r.yaml:3:13: layers[0]._target_: {REFUSED.format('Layer')}",
        "r.yaml:4:3: layers[0].nmae: unknown field; did you mean 'name'?",
    ]


def test_names_are_refused_where_any_data_may_stand_and_on_the_command_line(mistakes):
    assert mistakes("model: a\nextra: [{deep: {_target_: os.system}}]", "--optimizer._target_", "os.getpid") == [
        f"r.yaml:2:27: extra[0].deep._target_: {REFUSED.format('os.system')}",
        f"command line:1:1: optimizer._target_: {REFUSED.format('os.getpid')}",
    ]


def test_what_a_rewrite_translates_is_not_refused_and_what_it_leaves_is(schema):
    def rewrite(root, _):
        return replace(root, entries={key: entry for key, entry in root.entries.items() if key != "other"})

    text = "model: a\nother: {_target_: known.to.it}\n"
    assert read_recipe(schema.Recipe, "r.yaml", text=text, rewrite=rewrite).model == "a"
    with pytest.raises(RecipeError, match=r"^r\.yaml:3:19: extra\._target_: .*'_target_: left\.over'"):
        read_recipe(schema.Recipe, "r.yaml", text=f"{text}extra: {{_target_: left.over}}", rewrite=rewrite)
