"""The report shows every block of the model, groups neighbours, and is plain data on demand."""

import json
from textwrap import dedent

from ac_core import apply_activation_checkpointing
from ac_core.report import names_text


def test_neighbours_share_a_line(stack):
    report = apply_activation_checkpointing(stack(depth=3))
    assert str(report) == dedent("""\
        activation checkpointing: asked full (scope all) -> applied to 3 of 3 blocks
          blocks      count  part      found by            asked  applied  reason
          layers.0-2  3      language  repeated structure  full   full""")


def test_plain_data(stack):
    data = json.loads(json.dumps(apply_activation_checkpointing(stack(depth=2)).to_dict()))
    assert data["policy"] == "full"
    assert data["groups"][0]["blocks"] == ["layers.0", "layers.1"]
    assert data["groups"][0]["applied"] == "full"


def test_names_that_follow_one_another_are_said_as_one():
    names = ["layers.0", "layers.1", "layers.2", "layers.7", "tower.blocks.8", "tower.blocks.9", "head"]
    assert names_text(names) == "layers.0-2, layers.7, tower.blocks.8-9, head"
    assert names_text([]) == ""
