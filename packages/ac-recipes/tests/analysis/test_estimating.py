"""Estimates of a recipe are those of its real step."""

import pytest

from ac_core import apply_activation_checkpointing, remove_activation_checkpointing
from ac_recipes.analysis.estimating import estimate_policies, stated_assumptions
from ac_recipes.analysis.policies import policies
from ac_recipes.analysis.steps import RepeatableStep
from ac_recipes.analysis.subject import real_subject


def test_every_policy_is_estimated_within_three_percent_of_a_real_step(small):
    recipe = small()
    said = []
    estimates = estimate_policies(recipe, device="cpu", say=said.append)
    assert said == list(estimates) == ["none", "full", "selective"]
    subject = real_subject(recipe)
    step = RepeatableStep(subject)
    for name, config in policies(recipe).items():
        apply_activation_checkpointing(subject.model, config)
        step()
        _, peak = step.recorded()
        remove_activation_checkpointing(subject.model)
        assert estimates[name].peak_bytes == pytest.approx(peak, rel=0.03)


def test_the_recipes_own_policy_keeps_its_scope_and_layers(small):
    asked = "distributed.activation_checkpointing={policy: full, layers: '0'}"
    part = estimate_policies(small(asked), device="cpu")
    whole = estimate_policies(small(), device="cpu")
    assert part["none"].peak_bytes == whole["none"].peak_bytes
    assert whole["full"].peak_bytes < part["full"].peak_bytes < part["none"].peak_bytes
    assert part["selective"].recompute_flops < whole["selective"].recompute_flops


def test_what_is_taken_for_granted_of_the_recipe_is_said(small):
    recipe = small("step_scheduler.local_batch_size=2")
    said = " ".join(stated_assumptions(recipe, estimate_policies(recipe, device="cpu")))
    assert "the 300 entries that the tokenizer is asked for" in said
    assert "one rank; for more, give --distributed.dp_size" in said
    assert "a second, accumulated one finds the gradients" in said
