"""The figures of a run reach TensorBoard and Weights & Biases, and a missing package is told before anything runs."""

import sys

import pytest

from ac_recipes.cli import main
from ac_recipes.extras import install_extra
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import train

FIGURES = {"loss", "grad_norm", "lr", "tokens_per_second", "mem_gib"}


@pytest.mark.parametrize("section", ["tensorboard", "wandb"])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_missing_package_is_told_before_the_run_starts(tiny_file, capsys, monkeypatch, section, ranks):
    monkeypatch.setitem(sys.modules, section, None)  # as if it were not installed
    tiny_file.write_text(tiny_file.read_text() + f"{section}: {{}}\n")
    assert main(["train", str(tiny_file), "--nproc-per-node", ranks]) == 2
    assert capsys.readouterr().err == (
        f"ac-recipes: {section}: the package {section} is not installed; {install_extra(section)}, or leave the "
        "section out\n"
    )
    assert not (tiny_file.parent / "runs").exists()


def test_tensorboard_has_every_step_and_a_resumed_run_goes_on(tiny, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = tiny("tensorboard.log_dir=null", "step_scheduler.max_steps=4", "lr_scheduler.lr_decay_style=constant")
    result = train(recipe, "tiny")
    longer = tiny("tensorboard.log_dir=null", "lr_scheduler.lr_decay_style=constant")
    train(longer, "tiny", resume=result.run)
    events = accumulator.EventAccumulator(str(result.run / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == FIGURES | {"validation_loss"}
    logged = {line["step"]: line["loss"] for line in RunFolder(result.run).read_metrics() if "loss" in line}
    kept = {event.step: event.value for event in events.Scalars("loss")}
    assert kept == pytest.approx(logged)
    assert sorted(kept) == [1, 2, 3, 4, 5, 6]


def test_wandb_offline_keeps_every_step_under_one_run(tiny, monkeypatch):
    wandb = pytest.importorskip("wandb")
    logged, finished, init = [], [], wandb.init

    def watched(**arguments):
        run = init(**arguments)
        log, finish = run.log, run.finish
        monkeypatch.setattr(run, "log", lambda values, step: (logged.append((step, values)), log(values, step=step)))
        monkeypatch.setattr(run, "finish", lambda exit_code: (finished.append(exit_code), finish(exit_code=exit_code)))
        return run

    monkeypatch.setattr(wandb, "init", watched)
    result = train(tiny("wandb.mode=offline", "wandb.project=tests", "step_scheduler.max_steps=2"), "tiny")
    steps = [step for step, values in logged if set(values) == FIGURES]
    assert steps == [1, 2]
    assert [step for step, values in logged if "validation_loss" in values] == [0, 2]
    assert finished == [0]
    run_id = (result.run / "wandb-id.txt").read_text()
    assert list(result.run.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
