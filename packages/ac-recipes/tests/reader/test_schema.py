from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

import pytest

from ac_recipes.reader import read_recipe
from ac_recipes.reader.schema import ListShape, Shape, fields_of, homes_of, shape_of, tag_of


@pytest.mark.parametrize(
    ("annotation", "shape"),
    [
        (Union[int, Optional[str]], Shape(integer=True, string=True, null=True)),  # noqa: UP007, UP045
        (bool | Literal["a", None, "b"], Shape(boolean=True, null=True, choices=("a", "b"))),
        (list, Shape(lists=(ListShape(list, Any),))),
        (list[int], Shape(lists=(ListShape(list, int),))),
        (tuple[str, ...], Shape(lists=(ListShape(tuple, str),))),
        (tuple[int, str], Shape(lists=(ListShape(tuple, int, (int, str)),))),
        (dict, Shape(dicts=(Any,))),
        (dict[str, int], Shape(dicts=(int,))),
        (Any, Shape(anything=True, lists=(ListShape(list, Any),), dicts=(Any,))),
    ],
)
def test_annotations_laid_flat(annotation, shape):
    assert shape_of(annotation) == shape


@pytest.mark.parametrize("annotation", [bytes, set[int], dict[int, str], complex, "int"])
def test_a_schema_with_other_types_is_an_error_of_the_schema(annotation):
    with pytest.raises(TypeError, match="a recipe's schema cannot hold"):
        shape_of(annotation)


def test_a_schema_must_be_a_dataclass(schema):
    for wrong in (int, schema.Recipe(model="a")):
        with pytest.raises(TypeError, match="a schema is a dataclass"):
            read_recipe(wrong, "r.yaml", text="{}")


def test_fields_and_tags(schema):
    assert [name for name, field in fields_of(schema.Recipe).items() if field.required] == ["model"]
    assert tag_of((schema.FSDP2, schema.DDP)) == "strategy"
    assert tag_of((schema.FSDP2, schema.Layer)) is None
    assert tag_of((schema.FSDP2,)) is None


@dataclass(frozen=True)
class Tree:
    size: int = 0
    left: "Tree | None" = None


def test_homes_are_found_in_recursive_schemas_too(schema):
    assert homes_of("lr", schema.Recipe) == [("optimizer",)]
    assert homes_of("seed", schema.Recipe) == [()]
    assert homes_of("policy", schema.Recipe) == [("distributed", "activation_checkpointing")]
    assert homes_of("size", Tree) == [()]
    assert homes_of("none", Tree) == []


def test_recursive_schemas_are_read(read):
    assert read("left: {left: {size: 3}}", schema=Tree) == Tree(left=Tree(left=Tree(size=3)))
