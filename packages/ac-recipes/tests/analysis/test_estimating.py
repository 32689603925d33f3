"""Estimates of a recipe are those of its real step."""

import pytest
import torch

from ac_core import apply_activation_checkpointing, remove_activation_checkpointing
from ac_recipes.analysis.estimating import estimate_policies, stated_assumptions
from ac_recipes.analysis.policies import policies
from ac_recipes.analysis.steps import RepeatableStep
from ac_recipes.analysis.subject import real_subject, shape_batch
from ac_recipes.load import load_recipe
from ac_recipes.reader import split_overrides

ACCUMULATED = ("loss_fn.kind=plain", "model.dtype=bfloat16", "step_scheduler.global_batch_size=12")


@pytest.mark.parametrize("settings", [(), ACCUMULATED], ids=["fused", "plain, three microbatches"])
def test_every_policy_is_estimated_within_three_percent_of_a_real_step(small, settings):
    recipe = small(*settings)
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


def test_images_are_estimated_within_three_percent_of_a_real_step():
    pytest.importorskip("sklearn")
    recipe = load_recipe("vlm-digits")
    estimates = estimate_policies(recipe, device="cpu")
    subject = real_subject(recipe)
    step = RepeatableStep(subject)
    apply_activation_checkpointing(subject.model, recipe.distributed.checkpointing)
    step()
    _, peak = step.recorded()
    assert estimates["full"].peak_bytes == pytest.approx(peak, rel=0.03)
    assert not any("padding" in said for said in stated_assumptions(recipe, estimates))  # the batch has its pixels


@pytest.mark.parametrize("name", ["smollm2-sft", "smollm2-lora", "llama-3.2-1b-squad"])
def test_a_pretrained_model_is_estimated_where_neither_weights_nor_data_are(name, monkeypatch):
    def absent(what, *_):
        raise AssertionError(f"{what} was looked for")

    for place in ("pretrained.files_of_package", "pretrained.check_hub", "data.records.files_of_package"):
        monkeypatch.setattr(f"ac_recipes.{place}", absent)
    overrides = split_overrides(["--model.config.num_hidden_layers=1", "--dataset.sequence_length=32"])[1]
    recipe = load_recipe(name, overrides)
    if recipe.peft is not None:
        pytest.importorskip("peft")
    estimates = estimate_policies(recipe)
    embeddings = recipe.model.config["vocab_size"] * recipe.model.config["hidden_size"]
    assert estimates["full"].parameter_bytes > embeddings * torch.finfo(getattr(torch, recipe.model.dtype)).bits // 8


def test_packed_rows_have_more_than_one_example():
    names = ("packed_sequence.packed_sequence_size", "dataset.sequence_length", "validation_dataset.sequence_length")
    settings = [f"--{name}=7" for name in names]
    batch, _ = shape_batch(load_recipe("llama-3.2-1b-squad", split_overrides(settings)[1]), 2)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]] * 2


def test_the_recipes_own_policy_and_scope_are_kept(small):
    asked = "distributed.activation_checkpointing={policy: selective, layers: '0', save: [attention]}"
    found = policies(small(asked), budget="24GiB")
    assert list(found) == ["none", "full", "selective", "budget"]
    assert {config.layers for config in found.values()} == {"0"}
    assert [config.save for config in found.values()] == [None, None, ("attention",), None]
    assert found["budget"].memory_budget == "24GiB"


def test_what_is_taken_for_granted_of_the_recipe_is_said(tiny):
    recipe = tiny()
    said = " ".join(stated_assumptions(recipe, estimate_policies(recipe)))
    assert "the 300 entries that the tokenizer is asked for" in said
    assert "one rank; for more, give --distributed.dp_size" in said
    assert "the last of 2 microbatches, and adds to gradients that are there" in said
