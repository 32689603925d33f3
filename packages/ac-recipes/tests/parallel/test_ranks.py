"""Whatever the ranks share out, losses, gradient norms and weights are those of one process with the same batches."""

from pathlib import Path

import pytest

from ac_recipes.reader import read_recipe, split_overrides
from ac_recipes.recipe import Recipe
from ac_recipes.training.trainer import train

QWEN3 = (
    "model.config={model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}"
)
MOE = (
    "model.config={model_type: qwen3_moe, hidden_size: 32, moe_intermediate_size: 16, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, num_experts: 4, num_experts_per_tok: 2}"
)
VLM = """\
model:
  config:
    model_type: smolvlm
    tie_word_embeddings: true
    vision_config: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
                    num_channels: 1, image_size: 8, patch_size: 2}
    text_config: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
                  num_attention_heads: 4}
distributed: {activation_checkpointing: true}
dataset: {kind: digits, validation_fraction: 0.002}
tokenizer: {vocab_size: 400}
optimizer: {lr: 3.0e-3}
step_scheduler: {global_batch_size: 8, local_batch_size: 2, max_steps: 3, log_every_steps: 1}
"""
OFF, DDP = "distributed.activation_checkpointing=false", "distributed.strategy=ddp"
TAIL = "model.backend={dispatcher: hybridep, dispatcher_recompute_cache: moe_tail}"


def test_two_ranks_of_every_kind(short, train_on_ranks, metrics, assert_alike):
    tp, ep = "distributed.tp_size=2", "distributed.ep_size=2"
    cases = {
        "shards": ((), ()),
        "shards, nothing recomputed": ((), (OFF,)),
        "DDP": ((), (DDP,)),
        "DDP, nothing recomputed": ((), (DDP, OFF)),
        "copies alone": ((), ("distributed.dp_replicate_size=2",)),
        "tensor parallel, full": ((), (tp,)),
        "tensor parallel, selective": ((), (tp, "distributed.activation_checkpointing=selective")),
        "tensor parallel, plain loss": ((), (tp, "loss_fn.kind=plain")),
        "tensor parallel, tied head and norms of heads": ((QWEN3,), (tp,)),
        "experts, moe_tail": ((MOE,), (ep, TAIL)),
        "experts under DDP": ((MOE,), (ep, DDP)),
    }
    models = {model: train(short(*model), "alone").run for model in {model for model, _ in cases.values()}}
    balanced = (MOE.replace("num_experts:", "output_router_logits: true, router_aux_loss_coef: 0.5, num_experts:"),)
    jobs = [*cases.values(), (balanced, ()), (balanced, (ep, TAIL))]
    runs = train_on_ranks(2, *(short(*model, *settings) for model, settings in jobs))
    for (case, (model, _)), run in zip(cases.items(), runs[:-2], strict=True):
        assert_alike(run, models[model], case)
    for on, off in (runs[:2], runs[2:4]):  # the same ranks, the same sums
        assert [step["loss"] for step in metrics(on)] == [step["loss"] for step in metrics(off)]
    assert_alike(runs[-1], runs[-2], "experts shared out or not, with a loss for their balance")


def test_a_vision_language_model_with_a_scope_and_with_a_frozen_tower(tmp_path, train_on_ranks, assert_steps_alike):
    pytest.importorskip("sklearn")
    (tmp_path / "vlm.yaml").write_text(f"{VLM}run: {{dir: {tmp_path / 'vlm'}}}\n")

    def recipe(*settings):
        return read_recipe(Recipe, tmp_path / "vlm.yaml", split_overrides([f"--{each}" for each in settings])[1])

    frozen, scope = "freeze_config.freeze_embeddings=false", "distributed.activation_checkpointing_scope="
    runs = train_on_ranks(2, recipe(frozen, f"{scope}language"), recipe(DDP, f"{scope}multimodal"))
    assert_steps_alike(runs[0], train(recipe(frozen), "alone").run, "a frozen tower, and the language model recomputed")
    assert_steps_alike(runs[1], train(recipe(), "alone").run, "DDP, and the vision tower recomputed")


def test_four_ranks_that_share_out_several_things(short, train_on_ranks, assert_alike):
    cases = {
        "copies of shards": ((), ("distributed.dp_replicate_size=2",)),
        "shards of tensor-parallel parts": ((QWEN3,), ("distributed.tp_size=2",)),
        "copies of experts": ((MOE,), ("distributed.ep_size=2", "distributed.dp_replicate_size=2")),
    }
    one = ("step_scheduler.local_batch_size=1",)
    models = {model: train(short(*model), "alone").run for model, _ in cases.values()}
    runs = train_on_ranks(4, *(short(*one, *model, *settings) for model, settings in cases.values()))
    for (case, (model, _)), run in zip(cases.items(), runs, strict=True):
        assert_alike(run, models[model], case)


def test_a_run_goes_on_on_ranks_and_alone(short, train_on_ranks, assert_alike):
    constant = "lr_scheduler.lr_decay_style=constant"
    jobs, expected, longer = [], [], []
    for model, size in ((QWEN3, "distributed.tp_size=2"), (MOE, "distributed.ep_size=2")):
        settings = (constant, model, "step_scheduler.max_steps=4")
        expected.append(train(short(*settings), "whole").run)
        longer.append(short(*settings))
        half = train(short(*settings, "step_scheduler.max_steps=2"), "half").run
        jobs += [short(*settings, "step_scheduler.max_steps=2", size), (short(*settings, size), half)]
    runs = train_on_ranks(2, *jobs)
    for shared, resumed, whole, recipe in zip(runs[::2], runs[1::2], expected, longer, strict=True):
        assert_alike(resumed, whole, "from one process to ranks")
        train(recipe, "back", resume=Path(shared))
        assert_alike(shared, whole, "from ranks to one process")
