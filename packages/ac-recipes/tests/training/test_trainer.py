"""A run trains, shows first what was applied, logs every step, and resumes to the bit."""

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ac_recipes.errors import RunError, UsageError
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.resume import find_run
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import Trainer, train

GPT2 = "model.config={model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64, DROPOUT}"
DROPOUT = "resid_pdrop: 0.5, embd_pdrop: 0.5, attn_pdrop: 0.5"


NOISY = GPT2.replace("DROPOUT", DROPOUT)
"""Random numbers in every step."""


def losses(result):
    return {line["step"]: line["loss"] for line in RunFolder(result.run).read_metrics() if "loss" in line}


def final_weights(result):
    file = result.run.with_suffix(".pt")
    dcp_to_torch_save(whole_checkpoints(result.run / "checkpoints")[-1].path, file)
    return torch.load(file)["model"]


def test_a_run_leaves_everything_to_look_at_and_to_go_on_with(trained):
    result = trained()
    lines = result.out.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("setting"))
    first_step = next(i for i, line in enumerate(lines) if line.startswith("step "))
    assert table < first_step
    assert any(line.split()[:4] == ["activation", "checkpointing", "full", "full"] for line in lines)
    assert any("model.layers.0-1" in line and "found by GradientCheckpointingLayer" in line for line in lines)
    steps = [line for line in lines if " | mem " in line]
    assert len(steps) == 6
    assert all(" GiB |" in line for line in steps)
    assert sum("validation loss" in line for line in lines) == 3
    assert {p.name for p in result.run.iterdir()} == {
        "recipe.yaml", "tokenizer.json", "tokenizer_config.json", "data.sha256", "metrics.jsonl", "sessions.jsonl",
        "run.lock", "checkpoints",
    }  # fmt: skip
    assert [c.step for c in whole_checkpoints(result.run / "checkpoints")] == [2, 4, 6]
    assert sorted(losses(result)) == [1, 2, 3, 4, 5, 6]
    assert losses(result)[6] < losses(result)[1]


def test_off_says_off(trained):
    lines = trained("distributed.activation_checkpointing=false").out.splitlines()
    assert any(line.split()[:4] == ["activation", "checkpointing", "none", "none"] for line in lines)


@pytest.mark.parametrize(
    ("other", "asked"),
    [
        ((), "false"),
        ((), "selective"),
        ((), '{policy: selective, save: ["mlp.*"], layers: "1"}'),
        (("loss_fn.kind=plain",), "false"),
        ((NOISY,), "false"),
    ],
)
def test_checkpointing_changes_no_bit_of_the_losses_and_the_weights(trained, other, asked):
    full = trained(*other)
    result = trained(*other, f"distributed.activation_checkpointing={asked}")
    assert losses(full) == losses(result)
    left, right = final_weights(full), final_weights(result)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_accumulation_is_one_big_batch(trained):
    whole, parts = losses(trained("step_scheduler.local_batch_size=4")), losses(trained())
    assert all(math.isclose(whole[step], parts[step], rel_tol=1e-5) for step in whole)


@pytest.mark.parametrize("switch", ["true", "false", "selective"])
def test_a_run_that_stopped_resumes_to_the_bit_with_checkpointing_toggled(tiny, trained, switch, monkeypatch, capsys):

    class Killed(BaseException):
        pass

    step = Trainer.step

    def die_at_step_5(self):
        if self.steps_done == 4:
            raise Killed
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", die_at_step_5)
        with pytest.raises(Killed):
            train(tiny(NOISY), "tiny")
    recipe = tiny(NOISY, f"distributed.activation_checkpointing={switch}")
    newest = find_run(recipe, "tiny", str(sorted(Path(recipe.run.dir).iterdir())[-1]))
    result = train(recipe, "tiny", resume=newest)
    assert losses(result) == losses(trained(NOISY))
    changed = "changed since the run was last started: distributed.activation_checkpointing: full -> "
    now = {"true": None, "false": "none", "selective": "selective"}[switch]
    told = [line.removeprefix(changed) for line in capsys.readouterr().out.splitlines() if line.startswith(changed)]
    assert told == [now] * (now is not None)


def test_resume_refuses_another_model_and_a_run_without_a_checkpoint(tiny, tmp_path):
    result = train(tiny("step_scheduler.max_steps=2"), "tiny")
    with pytest.raises(UsageError, match=r"model\.config\.hidden_size was 32 in .* and is now 64"):
        find_run(tiny("model.config.hidden_size=64"), "tiny", str(result.run))
    with pytest.raises(UsageError, match=r"step_scheduler\.global_batch_size was 4 in .* and is now 8; .* start a new"):
        find_run(tiny("step_scheduler.global_batch_size=8"), "tiny", str(result.run))
    with pytest.raises(UsageError, match="not the folder of a run"):
        find_run(tiny(), "tiny", str(tmp_path))
    empty = RunFolder.create(tmp_path / "other", "tiny", tiny())
    with pytest.raises(UsageError, match="holds no whole checkpoint"):
        find_run(tiny(), "tiny", str(empty.path))
    assert find_run(tiny(), "tiny") == result.run
    with pytest.raises(UsageError, match=r"Set it back, go on with another run .*--resume RUN, .* start"):
        find_run(tiny("rng.seed=1"), "tiny")
    with pytest.raises(UsageError, match="no run of 'another'"):
        find_run(tiny(), "another")


def test_resume_refuses_another_text_a_damaged_tokenizer_and_fewer_steps_than_done(tiny, text_file):
    result = train(tiny(), "tiny")
    recipe_before = (result.run / "recipe.yaml").read_text()
    with pytest.raises(UsageError, match=r"has done 6 steps, more than step_scheduler\.max_steps 2"):
        find_run(tiny("step_scheduler.max_steps=2"), "tiny", str(result.run))
    tokenizer = (result.run / "tokenizer.json").read_text()
    (result.run / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read"):
        train(tiny("step_scheduler.max_steps=8"), "tiny", resume=result.run)
    (result.run / "tokenizer.json").write_text(tokenizer)
    fingerprint = (result.run / "data.sha256").rename(text_file.with_name("moved"))
    with pytest.raises(UsageError, match=r"data\.sha256 is missing, .* put it back from a copy of the run, or start"):
        train(tiny("step_scheduler.max_steps=8"), "tiny", resume=result.run)
    fingerprint.rename(result.run / "data.sha256")
    text_file.write_text(text_file.read_text().replace("square", "SQUARE"))
    with pytest.raises(UsageError, match="is not the data that"):
        train(tiny("step_scheduler.max_steps=8"), "tiny", resume=result.run)
    assert (result.run / "recipe.yaml").read_text() == recipe_before


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_spoiled(tiny):
    with pytest.raises(RunError, match=r"is (nan|inf) at step \d; .*optimizer\.lr"):
        train(tiny("optimizer.lr=1e30", "clip_grad_norm.max_norm=null", "lr_scheduler.lr_warmup_steps=0"), "tiny")


def test_dp_size_must_be_the_number_of_ranks(tiny):
    with pytest.raises(UsageError, match="dp_size: 4 ranks asked for, but the run has 1; .*--nproc-per-node 4"):
        train(tiny("distributed.dp_size=4"), "tiny")


def test_a_batch_without_a_label_is_a_loss_of_zero(tiny, monkeypatch):
    batches = Trainer.microbatches

    def ignored(self):
        return [batch | {"labels": batch["labels"].fill_(-100)} for batch in batches(self)]

    monkeypatch.setattr(Trainer, "microbatches", ignored)
    assert set(losses(train(tiny(), "tiny")).values()) == {0.0}


def test_validation_is_without_dropout_and_changes_nothing_of_the_training(trained):
    def first_validation(result):
        return next(x["validation_loss"] for x in RunFolder(result.run).read_metrics() if "validation_loss" in x)

    never = trained(NOISY, "step_scheduler.val_every_steps=null")
    assert losses(trained(NOISY)) == losses(never)
    quiet = GPT2.replace("DROPOUT", DROPOUT.replace("0.5", "0.0"))
    assert first_validation(trained(NOISY)) == first_validation(trained(quiet, "step_scheduler.max_steps=1"))


def test_a_vocabulary_that_the_text_does_not_fill_is_shown(tiny, capsys):
    train(tiny("tokenizer.vocab_size=5000", "step_scheduler.max_steps=1"), "tiny")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("vocabulary")]
    assert row.split()[1] == "5000"
    assert int(row.split()[2]) < 5000
    assert "no more merges" in row


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.config.num_hidden_layers=0", "distributed.activation_checkpointing: no block recognised"),
        ("model.config.num_hidden_layers=-2", "distributed.activation_checkpointing: no block"),
        ("run.dir=/proc/nope", "run.dir: cannot make a folder in /proc/nope"),
        ("run.dir=TEXT", "run.dir: cannot make a folder in"),
        ("model.config={model_type: gpt2, n_embd: 32, n_layer: 1, n_head: 5}", "model.config: "),
    ],
)
def test_what_cannot_be_built_is_one_line(tiny, text_file, setting, message):
    with pytest.raises(UsageError) as caught:
        train(tiny(setting.replace("TEXT", str(text_file))), "tiny")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_resuming_a_finished_run_says_that_nothing_is_left(tiny, capsys):
    result = train(tiny(), "tiny")
    train(tiny(), "tiny", resume=result.run)
    assert "nothing left to do: step_scheduler.max_steps is 6; raise it" in capsys.readouterr().out


def test_bfloat16_trains(tiny):
    result = losses(train(tiny("model.dtype=bfloat16"), "tiny"))
    assert result[6] < result[1]
