"""A plan in a recipe is for the budget and the step that the recipe asks for, or the recipe is refused."""

from dataclasses import replace

import pytest
import torch

from ac_recipes.analysis.planning import planned_recipe, recipe_to_train
from ac_recipes.cli import main
from ac_recipes.errors import UsageError
from ac_recipes.load import load_recipe
from ac_recipes.planned import planned_text
from ac_recipes.reader import RecipeError, dump, split_overrides
from ac_recipes.training.ranks import Ranks

FIELD = "distributed.activation_checkpointing"
BATCH = ("--step_scheduler.local_batch_size=8", "--step_scheduler.global_batch_size=8")


def ranks(count):
    return Ranks(0, count, torch.device("cpu"))


@pytest.fixture
def written(small, small_plan, tmp_path):
    """The small recipe with a plan for 0.7 in it, a step of 4 x 128 tokens on one rank."""
    path = tmp_path / "planned.yaml"
    path.write_text(dump(planned_recipe(small(), small_plan)))
    return path


def read(path, *arguments):
    return load_recipe(str(path), split_overrides(arguments)[1], quick=True)


def test_it_says_what_it_was_made_for_and_reads_back(written, small, small_plan):
    recipe = read(written)
    assert recipe == planned_recipe(small(), small_plan)
    made_for = {"memory_budget": 0.7, "local_batch_size": 4, "row_length": 128, "ranks": 1}
    assert recipe.distributed.checkpointing.planned_for == made_for
    assert read(written, f"--{FIELD}.memory_budget=70%").distributed.checkpointing.plan, "the same budget"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [f"--{FIELD}.memory_budget=10KiB"],
            f"{FIELD}.memory_budget: '10KiB' would count for nothing: the plan beside it was made for 0.7 and is "
            "applied as it is; leave the plan out (plan: null)",
        ),
        (
            [f"--{FIELD}.planned_for=null"],
            f"{FIELD}.memory_budget: 0.7 would count for nothing beside a plan that does not say in planned_for which",
        ),
        (
            BATCH,
            f"step_scheduler.local_batch_size: the plan in {FIELD} is for 4 x 128 tokens, and a step has 8 x 128 "
            f"tokens: it might take more than the memory_budget; leave the plan out ({FIELD}.plan: null)",
        ),
        (
            ["--dataset.sequence_length=256"],
            f"dataset.sequence_length: the plan in {FIELD} is for 4 x 128 tokens, and a step has 4 x 256 tokens",
        ),
    ],
)
def test_another_budget_or_a_larger_step_is_refused_with_the_remedy(written, capsys, arguments, message):
    for verb in ("check", "estimate", "train"):
        assert main([verb, str(written), *arguments]) == 2
        told = capsys.readouterr()
        assert message in told.out + told.err


@pytest.mark.parametrize("arguments", [[f"--{FIELD}.memory_budget=60%"], BATCH, ["--dataset.sequence_length=256"]])
def test_without_the_plan_it_is_made_anew(written, arguments):
    config = read(written, *arguments, f"--{FIELD}.plan=null").distributed.checkpointing
    assert (config.policy, config.plan, config.planned_for) == ("budget", None, None)


def test_what_ranks_change_is_known_when_they_are(small, small_plan):
    four = small("step_scheduler.global_batch_size=16", "step_scheduler.local_batch_size=8")
    recipe = planned_recipe(four, small_plan, 4)
    assert recipe.distributed.checkpointing.planned_for["local_batch_size"] == 4
    assert recipe_to_train(recipe, ranks(4)) is recipe
    assert recipe_to_train(recipe, ranks(8)) is recipe, "a smaller step, of smaller shares"
    with pytest.raises(UsageError, match=r"local_batch_size: the plan .* is for 4 x 128 .* a step has 8 x 128 tokens"):
        recipe_to_train(recipe, ranks(2))
    shares = small("step_scheduler.local_batch_size=1")
    with pytest.raises(UsageError, match=r"dp_size: the plan .* is for shares of 4 ranks, and those of 2 are larger"):
        recipe_to_train(planned_recipe(shares, small_plan, 4), ranks(2))
    whole = replace(shares, distributed=small("distributed.strategy=ddp").distributed)
    recipe = planned_recipe(whole, small_plan, 4)
    assert recipe_to_train(recipe, ranks(2)) is recipe, "with ddp each rank has the whole"


def test_what_is_known_of_it_is_told(small, small_plan):
    recipe = planned_recipe(small(), small_plan)
    assert planned_text(recipe, 1) == "the plan is for 4 x 128 tokens a rank, on 1 rank"
    assert planned_text(recipe, 2).endswith("on 1 rank; here 2 x 128 tokens on 2")
    config = replace(recipe.distributed.checkpointing, memory_budget=None, planned_for=None)
    by_hand = replace(recipe, distributed=replace(recipe.distributed, activation_checkpointing=config))
    assert planned_text(by_hand, 1) == "the plan does not say which batch it was made for"


@pytest.mark.parametrize("said", ["{local_batch_size: many}", "{memory_budget: 0.7, ranks: 0, row_length: 1}"])
def test_what_was_edited_into_nonsense_is_no_step(written, said):
    if "memory_budget" in said:
        assert "does not say which batch" in planned_text(read(written, f"--{FIELD}.planned_for={said}"), 1)
    else:
        with pytest.raises(RecipeError, match="does not say in planned_for which memory_budget"):
            read(written, f"--{FIELD}.planned_for={said}")
