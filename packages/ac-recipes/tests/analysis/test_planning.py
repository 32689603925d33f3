"""A plan for a recipe, applied, takes what it says."""

import pytest

from ac_core import apply_activation_checkpointing, remove_activation_checkpointing
from ac_recipes.analysis.planning import make_plan, planned_recipe, recipe_to_train
from ac_recipes.analysis.policies import budget_policy, policies
from ac_recipes.analysis.steps import RepeatableStep
from ac_recipes.analysis.subject import real_subject
from ac_recipes.errors import RunError, UsageError
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import train


@pytest.mark.parametrize("settings", [(), ("loss_fn.kind=plain", "model.dtype=bfloat16")], ids=str)
def test_a_plan_measures_within_three_percent_of_its_prediction(small, settings):
    recipe = small(*settings)
    plans = [
        make_plan(recipe, budget_policy(recipe.distributed.checkpointing, budget), device="cpu")
        for budget in (0.7, 0.85, 1.0)
    ]
    assert len({tuple(plan.blocks.items()) for plan in plans}) == 3
    subject = real_subject(recipe)
    step = RepeatableStep(subject)
    for plan in plans:
        apply_activation_checkpointing(subject.model, plan.to_config())
        step()
        _, peak = step.recorded()
        remove_activation_checkpointing(subject.model)
        assert peak == pytest.approx(plan.peak_bytes, rel=0.03)
        assert peak <= plan.budget_bytes * 1.03


def test_a_plan_is_for_the_ranks_of_the_recipe(small):
    alone = small("step_scheduler.local_batch_size=2", "step_scheduler.global_batch_size=8")
    sharded = small("step_scheduler.local_batch_size=2", "step_scheduler.global_batch_size=8", "distributed.dp_size=4")
    peaks = [make_plan(r, budget_policy(r.distributed.checkpointing, 1.0)).peak_bytes for r in (alone, sharded)]
    assert peaks[1] < peaks[0]


def test_what_does_not_fit_names_the_least_that_would(small):
    recipe = small()
    with pytest.raises(RunError, match=r"no plan fits into 1.00 MiB. The smallest peak of any is \d"):
        make_plan(recipe, budget_policy(recipe.distributed.checkpointing, "1MiB"), device="cpu")


def test_a_recipe_with_a_budget_trains_under_the_plan_for_it(tiny):
    budget = "distributed.activation_checkpointing={policy: budget, memory_budget: 0.9}"
    result = train(tiny(budget, "step_scheduler.max_steps=1", "dataset.sequence_length=64"), "tiny")
    written = RunFolder(result.run).recipe.read_text()
    assert "model.layers.1:" in written
    assert "memory_budget: 0.9" in written


def test_a_recipe_without_a_budget_is_trained_as_it_is(small):
    recipe = small()
    assert recipe_to_train(recipe, 2, "cpu") is recipe
    plan = make_plan(recipe, budget_policy(recipe.distributed.checkpointing, 1.0), device="cpu")
    planned = planned_recipe(recipe, plan)
    assert recipe_to_train(planned, 2, "cpu") is planned
    assert list(policies(planned)) == ["none", "full", "selective", "budget"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("distributed.dp_size=3",), "4 sequences cannot be shared evenly by 3 ranks"),
        (("distributed.dp_size=4", "distributed.activation_checkpointing=full"), "--distributed.dp_size 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(small, settings, message):
    recipe = small(*settings)
    with pytest.raises(UsageError, match=message):
        make_plan(recipe, budget_policy(recipe.distributed.checkpointing, 0.5))
        real_subject(recipe)
