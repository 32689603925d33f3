"""`import` prints a recipe that reads back, or nothing but the reasons against it."""

import json

import pytest

from ac_recipes.cli import main
from ac_recipes.load import load_recipe

AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  torch_dtype: float32
  config: {_target_: transformers.LlamaConfig, hidden_size: 64}
distributed: {strategy: ddp, activation_checkpointing: selective}
step_scheduler: {global_batch_size: 2, local_batch_size: 2, max_steps: 3}
ci: {recipe_owner: someone}
"""


@pytest.fixture
def automodel_file(tmp_path):
    path = tmp_path / "automodel.yaml"
    path.write_text(AUTOMODEL)
    return path


def left_out(path):
    """What is told of the recipe above."""
    return [
        "Left out, or not quite the same:",
        f"  {path}:1:1: recipe ('TrainFinetuneRecipeForNextTokenPrediction'): is what train does",
        f"  {path}:8:1: ci (a mapping): AutoModel's own tests",
        f"  {path}:2:1: model.torch_dtype (float32): "
        "all is computed in float32; AutoModel's FSDP2 computes in bfloat16",
    ]


def test_what_it_prints_is_a_recipe_with_the_same_meaning(capsys, automodel_file):
    assert main(["import", str(automodel_file)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    again = automodel_file.with_name("again.yaml")
    again.write_text(printed)
    assert load_recipe(str(again)) == load_recipe(str(automodel_file))
    assert "#   line 8: ci (a mapping): AutoModel's own tests" in printed
    assert "  activation_checkpointing: selective\n" in printed


def test_overrides_are_part_of_it(capsys, automodel_file):
    override = ["--distributed.activation_checkpointing", "full"]
    assert main(["import", str(automodel_file), *override]) == 0
    assert "  activation_checkpointing: full\n" in capsys.readouterr().out


def test_as_json(capsys, automodel_file):
    assert main(["import", str(automodel_file), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["recipe"].startswith(f"# {automodel_file}, translated")
    assert {"line": 8, "path": "ci", "reason": "AutoModel's own tests"} in printed["left_out"]


def test_what_cannot_be_translated_is_listed_and_nothing_printed(capsys, automodel_file):
    automodel_file.write_text(AUTOMODEL.replace("strategy: ddp", "pp_size: 2, pipeline: {}, mp_policy: {}"))
    assert main(["import", str(automodel_file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{automodel_file}:6:27: distributed.pipeline: not supported: pipeline parallelism" in err
    assert f"{automodel_file}:6:41: distributed.mp_policy: not supported: mixed precision" in err


def test_a_recipe_of_our_own_needs_no_import(capsys):
    assert main(["import", "default"]) == 2
    assert "default is a recipe of ac-recipes already" in capsys.readouterr().err


def test_check_reads_it_as_it_is(capsys, automodel_file):
    assert main(["check", str(automodel_file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{automodel_file}: no mistake found; ac-recipes import shows what it becomes",
        *left_out(automodel_file),
    ]
    assert main(["check", str(automodel_file), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert (checked["valid"], checked["errors"]) == (True, [])
    told = {"file": str(automodel_file), "line": 8, "column": 1, "path": "ci", "reason": "AutoModel's own tests"}
    assert told in checked["left_out"]


def test_train_says_the_same_before_it_trains(capsys, automodel_file, text_file, monkeypatch):
    small = [f"--dataset={{text: [{text_file}], sequence_length: 16}}", "--tokenizer.vocab_size=300"]
    small += ["--step_scheduler.max_steps=1", "--checkpoint.enabled=false", f"--run.dir={automodel_file.parent}"]
    assert main(["train", str(automodel_file), *small]) == 0
    out, _ = capsys.readouterr()
    told = left_out(automodel_file)
    assert out.splitlines()[: len(told)] == told
    assert out.splitlines()[len(told)].startswith("setting ")
    # ... and a launcher does so once, for its ranks
    monkeypatch.setattr("ac_recipes.cli.train.launch_ranks", lambda *_: None)
    assert main(["train", str(automodel_file), *small, "--nproc-per-node", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", told)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_ranks_that_torchrun_started_the_first_says_it(capsys, automodel_file, monkeypatch, rank):
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ac_recipes.cli.train.end_rank", lambda code: pytest.fail(f"ended with {code}"))
    assert main(["train", str(automodel_file), "--resume", "nowhere"]) == 2
    assert capsys.readouterr().out.splitlines() == (left_out(automodel_file) if rank == "0" else [])


def test_commands_that_look_at_it_say_so_on_standard_error(capsys, automodel_file):
    assert main(["plan", str(automodel_file)]) == 2  # for want of a budget
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[:-1]) == ("", left_out(automodel_file))
