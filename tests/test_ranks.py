"""Two gloo ranks train as one process does with the same global batch, with checkpointing on and off."""

import math


def test_ddp_and_fsdp2_on_two_ranks_equal_one_process(ac_recipes):
    alone = ac_recipes.train()
    for strategy in ("fsdp2", "ddp"):
        results = {}
        for checkpointing in ("true", "false"):
            arguments = ["--distributed.strategy", strategy, "--distributed.activation_checkpointing", checkpointing]
            results[checkpointing] = ac_recipes.train("--nproc-per-node", "2", *arguments)
        for step, line in alone.items():
            assert math.isclose(results["true"][step]["loss"], line["loss"], rel_tol=1e-5), (strategy, step)
            assert math.isclose(results["true"][step]["grad_norm"], line["grad_norm"], rel_tol=1e-4), (strategy, step)
            # The same ranks, the same sums: on and off agree to the bit.
            assert results["true"][step]["loss"] == results["false"][step]["loss"], (strategy, step)


def test_a_run_goes_on_with_another_number_of_ranks_and_another_strategy(ac_recipes):
    constant = ["--lr_scheduler.lr_decay_style", "constant"]  # so that the rate does not depend on max_steps
    whole = ac_recipes.train("--step_scheduler.max_steps", "6", *constant, "--run.dir", "whole")
    ac_recipes.train("--step_scheduler.max_steps", "3", *constant, "--nproc-per-node", "2")
    (run,) = (ac_recipes.folder / "runs").iterdir()
    done = ac_recipes(
        "train", "small.yaml", "--resume", "--step_scheduler.max_steps", "6", *constant, "--distributed.strategy", "ddp"
    )
    assert done.code == 0, done.err
    assert "changed since the run was last started: distributed.strategy: fsdp2 -> ddp" in done.out
    resumed = ac_recipes.metrics(run)
    assert sorted(resumed) == [1, 2, 3, 4, 5, 6]
    for step, line in whole.items():
        assert math.isclose(resumed[step]["loss"], line["loss"], rel_tol=1e-5), step


def test_a_mistake_is_told_once_before_ranks_are_started(ac_recipes):
    misspelt = ["--distributed.activation_checkpointing", "selctive"]
    done = ac_recipes("train", "small.yaml", "--nproc-per-node", "2", *misspelt)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("did you mean 'selective'?") == 1
    assert not (ac_recipes.folder / "runs").exists()
