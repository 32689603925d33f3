"""Commands that go with the one a run was started with."""

from pathlib import Path

import pytest

from ac_recipes.invocation import Invocation, without

TYPED = ("train", "my recipe.yaml", "--nproc-per-node=2", "--optimizer.lr", "-1e-4", "--resume", "--json")


def test_resume_is_the_same_command_on_that_run():
    resume = Invocation(TYPED).resume(Path("runs/x"))
    assert resume == (
        "ac-recipes train 'my recipe.yaml' --nproc-per-node=2 --optimizer.lr -1e-4 --json --resume runs/x"
    )


def test_plan_is_about_the_recipe_and_not_about_the_launch():
    plan = Invocation((*TYPED, "--nnodes", "2", "--rdzv-endpoint=a:1")).plan(int(79.99 * 2**30))
    assert plan == "ac-recipes plan 'my recipe.yaml' --optimizer.lr -1e-4 --budget 79.9GiB"


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["train", "--resume", "runs/x", "r"], ["train", "r"]),
        (["train", "r", "--resume"], ["train", "r"]),
        (["train", "r", "--resume", "--rng.seed", "1"], ["train", "r", "--rng.seed", "1"]),
        (["train", "r", "--resume=runs/x"], ["train", "r"]),
    ],
)
def test_a_flag_whose_value_may_be_missing_takes_no_other_flag_with_it(arguments, left):
    assert without(arguments, "--resume", value_may_be_missing=True) == left


def test_a_rank_knows_what_was_typed_to_its_launcher(monkeypatch):
    monkeypatch.setenv("AC_RECIPES_ARGUMENTS", "")
    Invocation(TYPED).hand_on()
    assert Invocation.of(["train", "my recipe.yaml"]) == Invocation(TYPED)


def test_under_torchrun_the_prefix_says_so(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert Invocation.of(["train", "r"]).resume(Path("runs/x")) == (
        "torchrun ... -m ac_recipes train r --resume runs/x"
    )
