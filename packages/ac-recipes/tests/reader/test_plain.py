import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ac_recipes.reader import dump, read_recipe, to_plain
from ac_recipes.reader.plain import dump as dump_itself

SETTINGS = settings(derandomize=True, max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_the_facade_is_the_module():
    assert dump is dump_itself


def test_every_field_is_told_in_order(read):
    recipe = read("model: a\nlayers: [{width: 1, name: '1'}]\ntags: [x, 'on']\nextra: {text: \"a\\nb\", none: ~}")
    assert dump(recipe) == textwrap.dedent("""\
        model: a
        seed: 0
        bits: null
        steps: 10
        distributed:
          strategy: fsdp2
          activation_checkpointing: null
          reshard_after_forward: true
          dp_size: null
        optimizer:
          name: adamw
          lr: 0.001
          betas: [0.9, 0.95]
          schedule: {}
        layers:
        - width: 1
          name: '1'
        tags: [x, 'on']
        extra:
          text: "a\\nb"
          none: null
        """)
    assert read(dump(recipe)) == recipe


@dataclass(frozen=True)
class Box:
    value: Any = None
    values: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (Box({"a": [1, math.inf]}), ValueError, r"value.a\[1\]: a recipe cannot hold inf"),
        (Box({1: 2}), TypeError, r"value: a recipe cannot hold \{1: 2\}"),
        (Box(object), TypeError, "value: a recipe cannot hold <class 'object'>"),
        (Box, TypeError, "expected a dataclass instance"),
        ({"a": 1}, TypeError, "expected a dataclass instance"),
    ],
)
def test_what_no_recipe_can_say(value, error, message):
    with pytest.raises(error, match=message):
        to_plain(value)


def test_shared_values_are_written_out():
    shared = {"a": ["x"]}
    assert dump(Box([shared, shared])) == "value:\n- a: [x]\n- a: [x]\nvalues: {}\n"


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
tricky = st.sampled_from(["1e-4", "nan", ".inf", "010", "0x1F", "on", "~", "", "<<", "=", "- a", "a: b", "#", "\x85"])
plain_data = st.recursive(
    scalars | tricky,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | tricky, inner, max_size=4),
    max_leaves=12,
)


@SETTINGS
@given(value=plain_data, values=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)))
def test_any_plain_data_survives(value, values):
    box = Box(value, values)
    again = read_recipe(Box, "r.yaml", text=dump(box))
    assert again == box
    assert repr(again) == repr(box)  # to `==`, 1, 1.0 and True are the same


def recipes(schema):
    asked = st.booleans() | st.sampled_from(["none", "full", "selective", "budget"]) | st.none()
    asked |= st.builds(
        schema.Checkpointing,
        policy=st.sampled_from(["none", "full", "selective"]),
        scope=st.sampled_from(["all", "language", (), ("language", "vision")]),
        memory_budget=st.none() | st.floats(0, 1e300) | st.text(),
        early_stop=st.booleans(),
    )
    floats = st.floats(allow_nan=False, allow_infinity=False)
    return st.builds(
        schema.Recipe,
        model=st.text() | tricky,
        seed=st.integers(),
        bits=st.sampled_from(["16", "32", "off", None]),
        steps=st.integers() | st.text() | tricky,
        distributed=st.builds(
            schema.FSDP2,
            activation_checkpointing=asked,
            reshard_after_forward=st.booleans(),
            dp_size=st.none() | st.integers(),
        )
        | st.builds(schema.DDP, activation_checkpointing=asked, find_unused_parameters=st.booleans()),
        optimizer=st.builds(
            schema.Optimizer,
            lr=floats,
            betas=st.tuples(floats, floats),
            schedule=st.dictionaries(st.text(), floats, max_size=3),
        ),
        layers=st.lists(st.builds(schema.Layer, width=st.integers(), name=st.text()), max_size=3),
        tags=st.lists(st.text() | tricky, max_size=3) | st.dictionaries(st.text(), st.text(), max_size=3),
        extra=plain_data,
    )


@SETTINGS
@given(data=st.data())
def test_any_recipe_survives(schema, data):
    recipe = data.draw(recipes(schema))
    text = dump(recipe)
    again = read_recipe(schema.Recipe, "r.yaml", text=text)
    assert again == recipe
    assert dump(again) == text
