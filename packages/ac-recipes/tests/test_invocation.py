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


@pytest.mark.parametrize(
    ("nodes", "prefix"),
    [
        ("1", "torchrun --nproc-per-node 4 -m ac_recipes"),
        ("2", "torchrun --nnodes 2 --rdzv-endpoint HOST:PORT --nproc-per-node 4 -m ac_recipes"),
    ],
)
def test_under_torchrun_the_command_is_one_of_torchrun(monkeypatch, nodes, prefix):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": nodes, "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert Invocation.of(["train", "r"]).resume(Path("runs/x")) == f"{prefix} train r --resume runs/x"
