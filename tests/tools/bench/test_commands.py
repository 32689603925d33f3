"""The whole tool on a tiny model, without peers."""

import json
from dataclasses import replace

import pytest
import torch.utils.checkpoint

from tools.bench.__main__ import main
from tools.bench.commands import run, variants_of
from tools.bench.contestant import Contestant
from tools.bench.meter import compare_gradients
from tools.bench.planned import ours_planned
from tools.bench.shapes import Shape, build_batch, build_model
from tools.bench.show import as_data, table
from tools.bench.variants import Variant, no_checkpointing, ours

pytest.importorskip("transformers")

TINY = Shape(hidden_size=16, sequence_length=8, heads=2, blocks=2, vocab_size=32, steps=1)


def test_whole_blocks_hold_less_and_give_equal_gradients():
    outcome = run("full", variants_of("full", only=["ours*", "Hugging*", "torch wrapper*"]), TINY, rounds=7)
    rows = {row.name: row for row in outcome.rows}
    assert list(rows) == ["none", "ours full", "Hugging Face full", "torch wrapper full"]
    assert {row.gradients for row in rows.values()} == {"equal"}
    held = {name: row.memory.held for name, row in rows.items()}
    assert held["ours full"] < 0.5 * held["none"]
    assert held["ours full"] <= 1.02 * held["Hugging Face full"]
    assert [goal.what for goal in outcome.goals] == ["time of ours full over Hugging Face full"]
    shown = table(outcome)
    assert all(name in shown for name in rows)
    data = json.loads(json.dumps(as_data(outcome)))
    assert [row["name"] for row in data["rows"]] == list(rows)
    assert data["versions"]["torch"].startswith("2.")


def test_a_planned_mix_holds_no_more_than_it_is_planned_for():
    shape = replace(TINY, sequence_length=64)
    rows = run("full", variants_of("full", only=["ours*"]), shape, rounds=7).rows
    none, full = (row.memory.held for row in rows)
    between = (none + full) // 2
    variants = [no_checkpointing(), ours_planned(between / 2**20, shape), ours_planned(0.001, shape)]
    outcome = run("selective", variants, shape, rounds=7)
    _, planned = outcome.rows
    of_generators = 6_000 * shape.blocks  # their states, 5 KB for each forward of a block, are no tensors of the step
    assert full < planned.memory.held <= between + of_generators < none
    assert planned.gradients == "equal"
    assert "no mix holds only 0.001 MiB" in outcome.missing[0].reason


def test_what_cannot_run_is_named_with_its_reason():
    variants = [no_checkpointing(), ours("full", {"scope": "audio"}), ours("full", {"no_such_field": 1})]
    outcome = run("selective", variants, TINY, rounds=7)
    assert [row.name for row in outcome.rows] == ["none"]
    no_audio, unknown = outcome.missing
    assert "language" in no_audio.reason
    assert "no_such_field" in unknown.reason
    assert no_audio.reason in table(outcome)


def test_a_tool_that_changes_torch_process_wide_does_so_for_itself_alone():
    listed, added = torch.utils.checkpoint.SAC_IGNORED_OPS, torch.ops.aten.view.default
    assert added not in listed
    seen = []

    def apply(model):
        listed.add(added)
        model.register_forward_pre_hook(lambda *_: seen.append(added in listed))

    contestant = Contestant(Variant("loud", "full", apply), build_model(TINY), build_batch(TINY))
    assert added not in listed
    contestant.step()
    assert seen == [True]
    assert added not in listed


def test_wrong_gradients_show():
    def apply(model):
        model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 1.01)

    model, batch = build_model(TINY), build_batch(TINY)
    right = Contestant(no_checkpointing(), model, batch).warm_up()
    wrong = Contestant(Variant("wrong", "full", apply), model, batch)
    assert wrong.examine(right)[1].startswith("differ by ")
    assert compare_gradients(right, right) == "equal"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["full", "--rounds", "6"], "at least 7"),
        (["selective", "--ours", "save=attention"], "not JSON"),
        (["selective", "--ours", "[1]"], "not a JSON object"),
    ],
)
def test_bad_arguments_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert says in capsys.readouterr().err
