import codecs
import re

import pytest

from ac_recipes.reader import RecipeError, read_recipe
from ac_recipes.reader.source import MAX_BYTES


@pytest.fixture
def told(tmp_path, monkeypatch, schema):
    """What reading a file of these bytes prints."""
    monkeypatch.chdir(tmp_path)

    def told(data):
        (tmp_path / "r.yaml").write_bytes(data)
        with pytest.raises(RecipeError) as caught:
            read_recipe(schema.Recipe, "r.yaml")
        return str(caught.value)

    return told


def test_a_file_is_read_by_path_or_name(tmp_path, schema):
    path = tmp_path / "r.yaml"
    path.write_text("model: größe\n", encoding="utf-8")
    assert read_recipe(schema.Recipe, path) == read_recipe(schema.Recipe, str(path)) == schema.Recipe(model="größe")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"model: a\nx: \xff\xfe", "r.yaml:2:4: byte 0xff is not UTF-8; save the recipe as UTF-8"),
        (b"model: \xc3", "r.yaml:1:8: byte 0xc3 is not UTF-8; save the recipe as UTF-8"),
        ("model: a".encode("utf-16"), "r.yaml:1:1: the recipe is UTF-16 or UTF-32; save it as UTF-8"),
        ("model: a".encode("utf-32"), "r.yaml:1:1: the recipe is UTF-16 or UTF-32; save it as UTF-8"),
        ("model: a".encode("utf-16-le"), "r.yaml:1:2: character '\\x00' is not allowed in YAML"),
        (
            codecs.BOM_UTF8 + b"model: a",
            "r.yaml:1:1: the recipe begins with a byte order mark; save it as UTF-8 without one",
        ),
        (b"model: a\nseed: \x00", "r.yaml:2:7: character '\\x00' is not allowed in YAML"),
        (b"model: \x1b[0m", "r.yaml:1:8: character '\\x1b' is not allowed in YAML"),
        (b"#" * (MAX_BYTES + 1), "r.yaml:1:1: a recipe has at most 1 MiB; this is more"),
        (b"", "r.yaml:1:1: expected a mapping, got nothing; a recipe has at least 'model'"),
    ],
)
def test_bytes_that_are_no_recipe(told, data, line):
    assert told(data) == line


def test_a_missing_file_and_a_directory(tmp_path, schema):
    for source, reason in [(tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")]:
        with pytest.raises(RecipeError, match=re.escape(f"{source}:1:1: cannot read the recipe: {reason}")):
            read_recipe(schema.Recipe, source)
    with pytest.raises(RecipeError, match="cannot read the recipe: embedded null byte"):
        read_recipe(schema.Recipe, "a\0b")


def test_the_bounds_hold_for_text_too(mistakes):
    assert mistakes("#" * (MAX_BYTES + 1)) == ["r.yaml:1:1: a recipe has at most 1 MiB; this is more"]
    assert mistakes("\ufeffmodel: a") == [
        "r.yaml:1:1: the recipe begins with a byte order mark; save it as UTF-8 without one"
    ]
