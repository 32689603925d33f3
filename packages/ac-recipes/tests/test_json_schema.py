"""The schema for editors says what the reader says, as far as types go."""

import json
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
import yaml

from ac_recipes.json_schema import field_docs, json_schema
from ac_recipes.reader import RecipeError, read_recipe, to_plain
from ac_recipes.recipe import Recipe
from ac_recipes.shipped import SHIPPED

jsonschema = pytest.importorskip("jsonschema")

MINIMAL = {"model": {"config": {"model_type": "llama"}}}
VALUES = [None, True, 3, 1.5, "x", "full", [], [0.5, 0.5], ["x"], {}, {"policy": "full"}, {"nonsense": 1}]


@pytest.fixture(scope="module")
def validator():
    schema = json_schema(Recipe)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_as_written_and_with_every_default(validator, path: Path):
    validator.validate(yaml.safe_load(path.read_text()))
    validator.validate(json.loads(json.dumps(to_plain(read_recipe(Recipe, path)))))


def _places() -> list[tuple[str, ...]]:
    """Every section, every field of each, and in each a field that is not there."""
    places: list[tuple[str, ...]] = []
    for section, kind in get_type_hints(Recipe).items():
        classes = [option for option in (kind, *get_args(kind)) if is_dataclass(option)]
        names = {field.name for cls in classes for field in fields(cls)}
        places += [(section,), (section, "nonsense"), *((section, name) for name in sorted(names))]
    return [*places, ("nonsense",)]


@pytest.mark.parametrize("place", _places(), ids=".".join)
def test_it_agrees_with_the_reader(validator, place: tuple[str, ...]):
    for value in VALUES:
        recipe: dict[str, Any] = json.loads(json.dumps(MINIMAL))
        section = recipe
        for key in place[:-1]:
            section = section.setdefault(key, {})
        section[place[-1]] = value
        try:
            read_recipe(Recipe, "r.yaml", text=json.dumps(recipe))
        except RecipeError as error:
            told = [mistake.message for mistake in error.mistakes]
            if any(message.startswith(("expected", "unknown field", "missing")) for message in told):
                assert not validator.is_valid(recipe), f"{value!r} is refused by the reader: {told}"
        else:
            assert validator.is_valid(recipe), f"{value!r} is accepted by the reader"


def test_fields_carry_their_descriptions_and_defaults():
    schema = json_schema(Recipe)
    ignored = schema["$defs"]["LossConfig"]["properties"]["ignore_index"]
    assert ignored["type"] == "integer"
    assert ignored["description"] == "label of the tokens that do not count."
    assert ignored["default"] == -100
    scope = schema["$defs"]["FSDP2Config"]["properties"]["activation_checkpointing_scope"]
    assert scope["description"].startswith("as `ActivationCheckpointingConfig.scope`")
    cache = schema["$defs"]["MoEConfig"]["properties"]["dispatcher_recompute_cache"]
    assert cache["enum"] == ["none", "combine", "moe_tail"]
    assert cache["description"].startswith("What a checkpointed block keeps")


@dataclass(frozen=True)
class Told:
    """One line.

    first, second: both of
        these.
    Attributes:
        third: this: that.
    """

    first: int
    second: int
    third: str = ""
    fourth: Literal["a", 1] | tuple[float, float] | None = None
    """Below."""


def test_where_descriptions_are_found():
    both = "both of these."
    assert field_docs(Told) == {"first": both, "second": both, "third": "this: that.", "fourth": "Below."}


def test_unions_tuples_and_required_fields():
    schema = json_schema(Told)
    assert schema["required"] == ["first", "second"]
    number = {"type": "number"}
    pair = {"type": "array", "prefixItems": [number, number], "minItems": 2, "maxItems": 2}
    assert schema["properties"]["fourth"]["anyOf"] == [{"type": "null"}, {"enum": ["a", 1]}, pair]


def test_two_classes_of_one_name_are_noticed():
    first = make_dataclass("Same", [("a", int, 1)], frozen=True)
    second = make_dataclass("Same", [("b", int, 1)], frozen=True)
    with pytest.raises(TypeError, match="two classes of Both have one name"):
        json_schema(make_dataclass("Both", [("x", first), ("y", second)], frozen=True))
