"""Values are set in YAML text, and the rest of it stays."""

import pytest
import yaml

from ac_recipes.analysis.yaml_text import set_in_text

TEXT = """\
# first
a:
  b: 1  # one
  c:
    d: [1, 2]
    # inside of c
  # at the end of a
e: {f: 1, g: 2}  # flow

# last
"""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("a.b", "2"),
        ("a.b", {"x": 1, "y": {"z": [1, "two"]}}),
        ("a.c", "null"),
        ("a.c", {"x": "y"}),
        ("a.c.d", "[3]"),
        ("a.c.new", "true"),
        ("a.c.new.deep", "true"),
        ("a.new", {"x": {"y": "z"}}),
        ("e", "3"),
        ("e.f", {"x": [1]}),
        ("e.new", "'1'"),
        ("new", {"x": 1}),
        ("new.deep.er", "1"),
    ],
)
def test_what_is_set_is_read_and_no_comment_is_lost(path, value):
    written = set_in_text(TEXT, path.split("."), value)
    expected = yaml.safe_load(TEXT)
    *outer, last = path.split(".")
    inner = expected
    for name in outer:
        inner = inner.setdefault(name, {})
    inner[last] = yaml.safe_load(value) if isinstance(value, str) else value
    assert yaml.safe_load(written) == expected
    comments = [line.partition("#")[2] for line in TEXT.splitlines() if "#" in line]
    replaced = {" inside of c"} if path == "a.c" else set()
    assert [c for c in comments if c not in replaced and c not in written] == []


@pytest.mark.parametrize("text", ["a: [1]\n", "a: &x {b: 1}\nc: *x\n", "[1]\n", "a: 1\n"])
def test_what_cannot_be_set_is_refused(text):
    with pytest.raises(ValueError, match="mapping|aliases"):
        set_in_text(text, ["a", "b"], "2")


def test_a_text_that_ends_without_a_line_end():
    assert yaml.safe_load(set_in_text("a:\n  b: 1", ["a", "c"], {"d": 2})) == {"a": {"b": 1, "c": {"d": 2}}}
