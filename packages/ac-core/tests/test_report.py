"""The report shows every block of the model, groups neighbours, and is plain data on demand."""

import json
from textwrap import dedent

from ac_core import apply_activation_checkpointing


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
