"""docs/automodel.md: its recipe is read, its commands run, and they print what it shows."""

import re
import shlex
from pathlib import Path

import pytest

from ac_recipes.cli import main

PAGE = (Path(__file__).parents[1] / "docs/automodel.md").read_text()
RECIPE, PRINTED, REFUSED = re.findall(r"^```(?:yaml)?\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^    ac-recipes (.*)$", PAGE, re.MULTILINE)
SMALL = ["--tokenizer.vocab_size=300", "--dataset.sequence_length=32", "--step_scheduler.max_steps=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pretrain.yaml").write_text(RECIPE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(capsys, command):
    arguments = shlex.split(command)
    assert main(arguments + (SMALL if arguments[0] == "train" else [])) == 0
    printed = capsys.readouterr().out
    assert "selective" in printed or arguments[0] == "check" or "activation_checkpointing: full" in printed


def test_the_page_shows_what_import_prints(capsys):
    assert len(COMMANDS) == 4
    assert main(["import", "pretrain.yaml"]) == 0
    head, _, recipe = capsys.readouterr().out.partition("\n\n")
    assert f"{head}\n" == PRINTED
    assert recipe.startswith("step_scheduler:")


def test_the_page_shows_what_is_refused(capsys):
    text = RECIPE.replace("tp_size: 1", "tp_size: 1\n  sequence_parallel: true")
    Path("pretrain.yaml").write_text(re.sub(r"(Entropy)\n", r"\1\n  fp32_upcast: false\n", text))
    assert main(["import", "pretrain.yaml"]) == 2
    assert capsys.readouterr().err == REFUSED
