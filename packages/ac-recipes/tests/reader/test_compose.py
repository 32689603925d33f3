import itertools
import time

import pytest


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("model: a\nmodel: b", ["r.yaml:2:1: model: duplicate key; first given at line 1"]),
        (
            "optimizer: {lr: 1, 'lr': 2}\nmodel: a",
            ["r.yaml:1:20: optimizer.lr: duplicate key; first given at line 1"],
        ),
        ("model: a\n1: b", ["r.yaml:2:1: a key must be a string; quote it: '1'"]),
        ("model: a\non: b", ["r.yaml:2:1: a key must be a string; quote it: 'on'"]),
        ("model: a\n~: b", ["r.yaml:2:1: a key must be a string; quote it: '~'"]),
        ("model: a\n? [x]\n: b", ["r.yaml:2:3: a key must be a string, not a list or mapping"]),
        (
            "extra: &x {a: 1}\noptimizer: {<<: *x}\nmodel: a",
            ["r.yaml:2:13: optimizer: merge keys ('<<') are not read; write the fields out"],
        ),
        ("model: a\n---\nmodel: b", ["r.yaml:2:1: a recipe is one YAML document; a second one begins here"]),
        (
            "model: !foo a",
            ["r.yaml:1:8: model: a recipe is data and builds no objects: the tag '!foo' is not read"],
        ),
        (
            "model: a\nextra: [1, !!python/object/apply:os.system [ls]]",
            [
                "r.yaml:2:12: extra[1]: a recipe is data and builds no objects: "
                "the tag '!!python/object/apply:os.system' is not read"
            ],
        ),
        (
            "!x model: a",
            # The tag belongs to the key, so what the mapping lacks is not known.
            ["r.yaml:1:1: a recipe is data and builds no objects: the tag '!x' is not read"],
        ),
        (
            "extra: &a [1, *a]",
            ["r.yaml:1:15: extra[1]: the alias '*a' stands inside what it names"],
        ),
        ("extra: *b", ["r.yaml:1:8: extra: no anchor '&b' before this alias"]),
        ("model: [a\nseed: 1", ["r.yaml:2:5: not valid YAML: expected ',' or ']', but got ':'"]),
        ("model: a\n\tseed: 1", ["r.yaml:2:1: not valid YAML: a tab cannot indent; use spaces"]),
        (
            "model:\n  a: 1\n    b: 2\n   c: 3",
            ["r.yaml:3:6: not valid YAML: mapping values are not allowed here"],
        ),
        (
            "model: {}\n  seed: 1",
            ["r.yaml:2:3: not valid YAML: this line is indented differently from the ones beside it"],
        ),
        ("model: a: b", ["r.yaml:1:9: not valid YAML: mapping values are not allowed here"]),
        ('model: "\\UFFFFFFFF"', ["r.yaml:1:11: not valid YAML: Python int too large to convert to C int"]),
        ("", ["r.yaml:1:1: expected a mapping, got nothing; a recipe has at least 'model'"]),
        ("# only a comment", ["r.yaml:1:1: expected a mapping, got nothing; a recipe has at least 'model'"]),
        ("null", ["r.yaml:1:1: expected a mapping, got null"]),
        ("full", ["r.yaml:1:1: expected a mapping, got 'full'"]),
        ("- model: a", ["r.yaml:1:1: expected a mapping, got a list"]),
    ],
)
def test_what_a_recipe_must_not_hold(mistakes, text, lines):
    assert mistakes(text) == lines


def test_all_refusals_are_told_at_once(mistakes):
    text = """\
        model: !x a
        seed: 1
        seed: 2
        1: 3
        extra: {b: !y 4, <<: 5}
        """
    assert [line.split(": ")[0] for line in mistakes(text)] == [
        "r.yaml:1:8",
        "r.yaml:3:1",
        "r.yaml:4:1",
        "r.yaml:5:12",
        "r.yaml:5:18",
    ]


def test_aliases_and_harmless_directives_are_read(read):
    recipe = read("%YAML 1.2\n---\nmodel: &m a\ntags: [*m, *m]\nextra: {k: *m}\n...\n")
    assert (recipe.model, recipe.tags, recipe.extra) == ("a", ["a", "a"], {"k": "a"})


def test_quoted_keys_are_strings_whatever_they_say(read):
    assert read("model: a\nextra: {'1': x, 'on': y, '<<': z}").extra == {"1": "x", "on": "y", "<<": "z"}


def test_billion_laughs_end_quickly(mistakes):
    names = "abcdefghijklmnopqrstuvwxyz"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in itertools.pairwise(names)]
    start = time.perf_counter()
    (line,) = mistakes("\n".join(lines))
    assert line.endswith("more than 10000 values, with aliases written out")
    assert time.perf_counter() - start < 1


def test_aliases_count_towards_the_depth(mistakes):
    lines = ["k0: &k0 [x]"] + [f"k{i}: &k{i} [*k{i - 1}]" for i in range(1, 60)]
    assert mistakes("\n".join(lines)) == ["r.yaml:50:12: more than 50 lists and mappings inside one another"]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[{a: "])
def test_depth_is_bounded_and_not_by_the_stack(mistakes, opening):
    start = time.perf_counter()
    (line,) = mistakes(opening * 100_000)
    assert line.endswith("more than 50 lists and mappings inside one another")
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "text",
    [
        "seed: 1" + "_" * 100_000 + "x",
        "seed: " + "0" * 100_000 + "x",
        "seed: " + "9" * 100_000,
        "extra: " + "1" * 100_000 + "e",
        "".join(f"modle{i}: 1\n" for i in range(4000)),
        "model" * 20_000 + ": 1",
    ],
    ids=["underscores", "zeros", "nines", "exponent", "unknown keys", "long key"],
)
def test_no_text_takes_long(mistakes, text):
    start = time.perf_counter()
    assert max(map(len, mistakes(text))) < 300
    assert time.perf_counter() - start < 3
