"""The sweep over transformers' classes: a fixed sample of it, and the tool itself. `docs/sweep.md` has the whole."""

import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ac_core import BlockGroup, Report
from tools.sweep import __main__ as command
from tools.sweep import check as checking
from tools.sweep import table
from tools.sweep.check import EQUAL, check
from tools.sweep.families import FAMILIES
from tools.sweep.models import classes, tiny_model
from tools.sweep.runner import run

ROOT = Path(__file__).parents[1]

SAMPLE: dict[str, set[str]] = {
    "LlamaForCausalLM": set(),
    "Gemma2ForCausalLM": set(),
    "GPT2LMHeadModel": set(),
    # Mixture of experts: these normalise the router's top-k in place.
    "MixtralForCausalLM": set(),
    "MiniMaxForCausalLM": set(),
    "MellumForCausalLM": set(),
    "Qwen3NextForCausalLM": set(),
    "Qwen3VLMoeForConditionalGeneration": {"vision"},
    "Qwen3_5MoeForConditionalGeneration": {"vision"},
    # Latent attention; keys and values shared between layers.
    "DeepseekV3ForCausalLM": set(),
    "Gemma3nForCausalLM": set(),
    "Gemma4ForConditionalGeneration": {"vision", "audio"},
    # Encoder and decoder
    "T5ForConditionalGeneration": set(),
    "MT5ForConditionalGeneration": set(),
    "BartForConditionalGeneration": set(),
    "WhisperForConditionalGeneration": {"audio"},
    # Images and sound
    "Qwen2AudioForConditionalGeneration": {"audio"},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"vision", "audio"},
    "Phi4MultimodalForCausalLM": {"vision", "audio"},
    "Qwen2_5_VLForConditionalGeneration": {"vision"},
    "LlavaForConditionalGeneration": {"vision"},
    "Gemma3ForConditionalGeneration": {"vision"},
    "MllamaForConditionalGeneration": {"vision"},
    # State space
    "Mamba2ForCausalLM": set(),
    "JambaForCausalLM": set(),
}
"""Classes and the towers that they must have; gradients must reach these and any other tower of the class."""


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("name", SAMPLE)
def test_trains_as_without_checkpointing(name: str, policy: str):
    result = check(name, classes()[name], policy, dropout=0.1)
    assert (result.outcome, result.reason) == (EQUAL, "")
    assert result.recomputed > 0
    assert SAMPLE[name] <= result.towers.keys()
    assert all(result.towers.values())


def test_every_family_is_a_model_type():
    assert FAMILIES.keys() <= CONFIG_MAPPING_NAMES.keys()


def test_dropout_is_on_only_where_a_class_has_it():
    assert tiny_model("GPT2LMHeadModel", dropout=0.1).transformer.drop.p == 0.1
    assert tiny_model("GPT2LMHeadModel").transformer.drop.p == 0.0
    assert tiny_model("LlamaForCausalLM", dropout=0.1).model.layers[0].self_attn.attention_dropout == 0.0


def test_other_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch):
    def double_a_weight(model, _policy):
        model.model.layers[1].mlp.up_proj.weight.data.mul_(2)
        return Report("full", ("all",), ())

    monkeypatch.setattr(checking, "apply_activation_checkpointing", double_a_weight)
    result = check("LlamaForCausalLM", "causal", "full")
    assert result.outcome == "different"
    assert "loss" in result.reason
    assert "gradients, the first" in result.reason


def test_a_report_without_a_recompute_is_noticed(monkeypatch: pytest.MonkeyPatch):
    group = BlockGroup(("model.layers.0",), "language", "", "full", "full")
    monkeypatch.setattr(checking, "apply_activation_checkpointing", lambda *_: Report("full", ("all",), (group,)))
    result = check("LlamaForCausalLM", "causal", "full")
    assert (result.outcome, result.reason) == ("idle", "1 of 1 blocks, the first is model.layers.0")


def test_a_class_that_does_not_build_costs_itself_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checking, "tiny_model", lambda *_: 1 / 0)
    result = check("LlamaForCausalLM", "causal", "full")
    assert (result.outcome, result.reason) == ("unbuilt", "ZeroDivisionError: division by zero (test_sweep.py)")


WORKER = """
import json, signal, sys, time

for line in sys.stdin:
    kind, name = line.split()
    if name == "dies":
        signal.raise_signal(signal.SIGKILL)
    if name == "hangs":
        time.sleep(600)
    print(json.dumps({"name": name, "kind": kind, "outcome": "equal"}), flush=True)
"""


@pytest.fixture
def outcomes(tmp_path: Path):
    """Runs classes through a worker that does nothing but live, die or hang; the outcome of each."""
    script = tmp_path / "worker.py"
    script.write_text(dedent(WORKER))

    def of(*names: str, jobs: int = 1, limit: float = 60) -> dict[str, tuple[str, str]]:
        records = []
        pairs = [(name, "causal") for name in names]
        run(pairs, [sys.executable, str(script)], jobs=jobs, limit=limit, done=records.append)
        return {record["name"]: (record["outcome"], record.get("reason", "")) for record in records}

    return of


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_process_that_dies_costs_its_class_alone(outcomes, jobs: int):
    assert outcomes("a", "dies", "b", jobs=jobs) == {
        "a": ("equal", ""),
        "dies": ("crashed", "SIGKILL"),
        "b": ("equal", ""),
    }


def test_a_process_that_hangs_is_ended(outcomes):
    assert outcomes("hangs", limit=1) == {"hangs": ("too slow", "more than 1 s")}


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch):
    """The command line over three classes, of which one does not run; what it checked."""
    checked: list[str] = []

    def fake(pairs, _command, *, done, **_):
        for name, kind in pairs:
            checked.append(name)
            outcome = "equal" if name != "C" else "failed"
            done({"name": name, "kind": kind, "outcome": outcome, "reason": "", "towers": {"vision": True}})

    monkeypatch.setattr(command, "run", fake)
    monkeypatch.setattr(command, "_classes", lambda: dict.fromkeys("ABC", "causal"))

    def call(*arguments: str) -> tuple[int, list[str]]:
        checked.clear()
        return command.main(list(arguments)), list(checked)

    return call


def test_the_exit_code_says_whether_enough_are_equal(sweep, capsys: pytest.CaptureFixture[str]):
    assert sweep("full", "--need", "2") == (0, ["A", "B", "C"])
    assert capsys.readouterr().out.splitlines() == [
        "failed C:",
        "full: 2 of 3 classes that train are equal bit for bit (3 looked at; 1 failed)",
        "towers reached by gradients: 3 of 3",
    ]
    assert sweep("full", "--need", "3")[0] == 1
    assert sweep("full", "--only", "A", "--need", "1") == (0, ["A"])


def test_a_run_goes_on_from_its_file_and_from_no_other_run(sweep, tmp_path: Path):
    kept = tmp_path / "full.json"
    assert sweep("full", "--only", "B", "--json", str(kept)) == (0, ["B"])
    assert sweep("full", "--json", str(kept)) == (0, ["A", "C"])
    assert [record["name"] for record in json.loads(kept.read_text())["results"]] == ["A", "B", "C"]
    with pytest.raises(SystemExit, match="holds another run"):
        sweep("full", "--dropout", "--json", str(kept))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fool"], "policy: 'fool' is not one of"),
        (["full", "--only", "D"], "transformers has no generation class D"),
        (["full", "--jobs", "0"], "--jobs: 0 is not at least 1"),
    ],
)
def test_bad_arguments(sweep, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str):
    with pytest.raises(SystemExit) as ended:
        sweep(*arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_tables_replace_those_of_the_page(tmp_path: Path):
    records = [
        {"name": "A", "kind": "causal", "outcome": "equal", "reason": "", "towers": {}},
        {"name": "B", "kind": "image-text", "outcome": "equal", "reason": "", "towers": {"vision": True, "vq": False}},
        {"name": "C", "kind": "causal", "outcome": "unbuilt", "reason": "no | here", "towers": {}},
    ]
    head = {"policy": "full", "dropout": False, "transformers": "5", "torch": "2", "python": "3"}
    failed = {**records[0], "outcome": "failed", "reason": "why"}
    other = {**head, "policy": "selective", "results": [failed, records[2]]}
    text = table.tables([{**head, "results": records}, other])
    for row in (
        "| full | 3 | 2 | 2 | 1 of 2 |",
        "| causal | 2 | 1 | 1 | 0 of 0 |",
        "| selective | 2 | 1 | 0 | 0 of 0 |",
        "| `A` | selective | failed | why |",
        "| `C` | every | unbuilt | no \\| here |",
        "| `B` | vq |",
    ):
        assert row in text.splitlines()
    page = tmp_path / "sweep.md"
    page.write_text((ROOT / "docs" / "sweep.md").read_text())
    before = page.read_text().partition(table.BEGIN)[0]
    table.write(page, text)
    table.write(page, text)
    assert page.read_text().startswith(before)
    assert page.read_text().count(text) == 1
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for the tables"):
        table.write(page, text)
