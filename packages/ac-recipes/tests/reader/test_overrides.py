import pytest

from ac_recipes.reader import Override, RecipeError, split_overrides


@pytest.mark.parametrize(
    ("argv", "rest", "overrides"),
    [
        ([], [], []),
        (["train", "r.yaml", "--json"], ["train", "r.yaml", "--json"], []),
        (["--a.b", "1"], [], [Override("a.b", "1", 1)]),
        (["--a.b=1"], [], [Override("a.b", "1", 1)]),
        (["--a.b=x=y"], [], [Override("a.b", "x=y", 1)]),
        (["--a.b="], [], [Override("a.b", "", 1)]),
        (["--a.b", ""], [], [Override("a.b", "", 1)]),
        (["--a.b", "-0.1"], [], [Override("a.b", "-0.1", 1)]),
        (["--a.b", "-x"], [], [Override("a.b", "-x", 1)]),
        (["--a.b", "[language, vision]"], [], [Override("a.b", "[language, vision]", 1)]),
        # a launcher flag between overrides, a stray word, values with dots that belong to other flags
        (
            ["r.yaml", "--a.b", "1", "--nproc-per-node", "2", "stray", "--c.d=2", "--out=x.json"],
            ["r.yaml", "--nproc-per-node", "2", "stray", "--out=x.json"],
            [Override("a.b", "1", 8), Override("c.d", "2", 41)],
        ),
        (["--a.b", "1", "--", "--c.d", "2"], ["--", "--c.d", "2"], [Override("a.b", "1", 1)]),
        (["-a.b", "1"], ["-a.b", "1"], []),
    ],
)
def test_dotted_flags_are_taken_out(argv, rest, overrides):
    assert split_overrides(argv) == (rest, overrides)


@pytest.mark.parametrize(
    ("argv", "rest", "overrides"),
    [
        (["--opt", "{lr: 1}", "r.yaml"], ["r.yaml"], [Override("opt", "{lr: 1}", 1)]),
        (["r", "--opt={a: 1}", "--opt=null"], ["r"], [Override("opt", "{a: 1}", 3), Override("opt", "null", 16)]),
        (["--other", "x", "--other=x", "opt"], ["--other", "x", "--other=x", "opt"], []),
        # a name that the program has as a flag of its own
        (["--fast", "r.yaml", "--fast=true"], ["--fast", "r.yaml"], [Override("fast", "true", 15)]),
        (["--", "--opt", "{}"], ["--", "--opt", "{}"], []),
    ],
)
def test_sections_are_taken_out_by_name(argv, rest, overrides):
    assert split_overrides(argv, sections=("opt", "fast"), flags=("fast", "json")) == (rest, overrides)


def test_a_section_without_value_is_told():
    with pytest.raises(RecipeError) as caught:
        split_overrides(["r.yaml", "--opt", "--json", "--opt"], sections=("opt",))
    assert str(caught.value).splitlines() == [
        "command line:1:8: opt: needs a value: --opt VALUE or --opt=VALUE",
        "command line:1:21: opt: needs a value: --opt VALUE or --opt=VALUE",
    ]


def test_flags_without_value_are_all_told():
    with pytest.raises(RecipeError) as caught:
        split_overrides(["r.yaml", "--a.b", "--json", "--a..b", "1", "--.a=1", "--c.d"])
    assert str(caught.value).splitlines() == [
        "command line:1:8: a.b: needs a value: --a.b VALUE or --a.b=VALUE",
        "command line:1:21: ['a..b']: not a dotted path such as --section.field",
        "command line:1:30: ['.a']: not a dotted path such as --section.field",
        "command line:1:37: c.d: needs a value: --c.d VALUE or --c.d=VALUE",
    ]


@pytest.mark.parametrize("value", ["true", "yes", "on"])
@pytest.mark.parametrize("form", ["{0} {1}", "{0}={1}"])
def test_both_forms_mean_the_same(read, value, form):
    flag = "--distributed.activation_checkpointing"
    assert read("model: a", *form.format(flag, value).split()).distributed.activation_checkpointing is True


def test_an_override_made_by_hand_needs_no_column():
    assert str(Override("a.b", "1").place) == "Place(file='command line', line=1, column=1)"
