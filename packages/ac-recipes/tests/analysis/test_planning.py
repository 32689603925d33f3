"""A plan for a recipe, applied, takes what it says."""

from contextlib import contextmanager

import pytest
import torch

import ac_core
from ac_core import apply_activation_checkpointing
from ac_recipes.analysis.planning import make_plan, planned_recipe, recipe_to_train
from ac_recipes.analysis.policies import budget_policy
from ac_recipes.analysis.steps import RepeatableStep
from ac_recipes.analysis.subject import real_subject, step_settings
from ac_recipes.errors import UsageError
from ac_recipes.load import load_recipe
from ac_recipes.reader import split_overrides
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import train


def test_a_plan_measures_within_three_percent_of_its_prediction(small, small_plan):
    assert len(set(small_plan.blocks.values())) > 1
    subject = real_subject(small())
    step = RepeatableStep(subject)
    apply_activation_checkpointing(subject.model, small_plan.to_config())
    step()
    _, peak = step.recorded()
    assert peak == pytest.approx(small_plan.peak_bytes, rel=0.03)
    assert peak <= small_plan.budget_bytes * 1.03


def test_a_plan_is_for_the_ranks_and_the_batch_of_the_recipe(small):
    batches = ("step_scheduler.local_batch_size=2", "step_scheduler.global_batch_size=8")
    settings = step_settings(small(*batches, "distributed.dp_size=4"), device="cuda", kernels="plain")
    assert (settings["strategy"], settings["dp_size"], settings["loss"]) == ("fsdp2", 4, "fused")
    assert settings["batch"]["input_ids"].shape == (2, 128)
    alone = step_settings(small(*batches), device="cuda", kernels="plain")
    assert (alone["strategy"], alone["dp_size"]) == ("none", 1)


def test_experts_shared_over_ranks_are_planned_for():
    recipe = load_recipe("qwen3-moe", split_overrides(["--model.config.num_hidden_layers=2"])[1])
    settings = step_settings(recipe, device="cpu", kernels="plain")
    assert (settings["ep_size"], settings["dp_size"], settings["gradient_accumulation_steps"]) == (2, 2, 1)
    plan = make_plan(recipe, budget_policy(recipe.distributed.checkpointing, 0.9), device="cpu")
    assert plan.peak_bytes <= plan.budget_bytes < plan.none_peak_bytes
    assert len(plan.blocks) == 2


def test_what_does_not_fit_names_the_least_that_would(small):
    recipe = small()
    least = r"no plan fits into 1.00 MiB \(1.05 MB\). The smallest peak of any is \d"
    with pytest.raises(UsageError, match=rf"^distributed.activation_checkpointing.memory_budget: {least}") as told:
        make_plan(recipe, budget_policy(recipe.distributed.checkpointing, "1MiB"), device="cpu")
    assert "(distributed: {activation_checkpointing_offload: cpu})" in str(told.value)
    assert "=" not in str(told.value), "settings as a recipe has them, not as Python does"


def test_a_recipe_with_a_budget_trains_under_the_plan_for_it(tiny):
    budget = "distributed.activation_checkpointing={policy: budget, memory_budget: 0.9}"
    result = train(tiny(budget, "step_scheduler.max_steps=1", "dataset.sequence_length=64"), "tiny")
    written = RunFolder(result.run).recipe.read_text()
    assert "model.layers.1:" in written
    assert "memory_budget: 0.9" in written


def test_a_recipe_that_needs_no_plan_is_trained_as_it_is(small, small_plan):
    for recipe in (small(), planned_recipe(small(), small_plan)):
        assert recipe_to_train(recipe, Ranks(0, 2, torch.device("cpu"))) is recipe


def test_before_a_run_the_smallest_card_of_its_ranks_decides(small, small_plan, monkeypatch):
    free, current = [30, 20, 10], []

    @contextmanager
    def device(card):
        current.append(card)
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (free[card], 40))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(ac_core, "plan", lambda **_: small_plan)
    monkeypatch.setattr("ac_recipes.analysis.subject.check_backend", lambda *_: None)  # there is no card to ask
    for ranks in (1, 2, 4):  # of four, three are on this machine
        recipe = small(f"distributed.dp_size={ranks}")
        make_plan(recipe, budget_policy(recipe.distributed.checkpointing, "device"))
    assert current == [1, 2]


def test_sizes_that_do_not_fit_are_refused(small):
    with pytest.raises(UsageError, match="4 sequences cannot be shared evenly by 3 ranks"):
        step_settings(small("distributed.dp_size=3"), device="cuda", kernels="plain")
    with pytest.raises(UsageError, match=r"this command runs on one process; add --distributed.dp_size 1"):
        real_subject(small("distributed.dp_size=4"))
