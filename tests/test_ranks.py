"""Ranks that the command line starts train as one process does with the same global batch."""

import math

from ac_recipes.cli import main


def test_a_run_goes_on_with_another_number_of_ranks_and_another_strategy(ac_recipes, monkeypatch, capsys):
    constant = ["--lr_scheduler.lr_decay_style", "constant"]  # so that the rate does not depend on max_steps
    ac_recipes.train("--step_scheduler.max_steps", "3", *constant, "--nproc-per-node", "2")
    (run,) = (ac_recipes.folder / "runs").iterdir()
    alone = ["train", "small.yaml", "--step_scheduler.max_steps", "6", *constant]
    monkeypatch.chdir(ac_recipes.folder)
    assert main([*alone, "--run.dir", "whole"]) == 0
    assert main([*alone, "--resume", "--distributed.strategy", "ddp"]) == 0
    assert "changed since the run was last started: distributed.strategy: fsdp2 -> ddp" in capsys.readouterr().out
    (whole,) = (ac_recipes.folder / "whole").iterdir()
    resumed = ac_recipes.metrics(run)
    assert sorted(resumed) == [1, 2, 3, 4, 5, 6]
    for step, line in ac_recipes.metrics(whole).items():
        assert math.isclose(resumed[step]["loss"], line["loss"], rel_tol=1e-5), step


def test_a_mistake_is_told_once_before_ranks_are_started(ac_recipes):
    misspelt = ["--distributed.activation_checkpointing", "selctive"]
    done = ac_recipes("train", "small.yaml", "--nproc-per-node", "2", *misspelt)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("did you mean 'selective'?") == 1
    assert not (ac_recipes.folder / "runs").exists()
