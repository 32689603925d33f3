"""Two gloo ranks train a vision-language model as one process does, with a scope and with a frozen tower."""

import math

import pytest

RECIPE = """\
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

FROZEN = ("--freeze_config.freeze_embeddings", "false")  # and the vision tower, by default


@pytest.mark.parametrize(("strategy", "scope", "more"), [("fsdp2", "language", FROZEN), ("ddp", "multimodal", ())])
def test_two_ranks_are_one_process(ac_recipes, strategy, scope, more):
    pytest.importorskip("sklearn")
    (ac_recipes.folder / "small.yaml").write_text(RECIPE)
    alone = ac_recipes.train(*more)
    placed = ["--distributed.strategy", strategy, "--distributed.activation_checkpointing_scope", scope, *more]
    both = ac_recipes.train("--nproc-per-node", "2", *placed)
    assert both.keys() == alone.keys() == {1, 2, 3}
    for step, line in alone.items():
        assert math.isclose(both[step]["loss"], line["loss"], rel_tol=1e-5), step
        assert math.isclose(both[step]["grad_norm"], line["grad_norm"], rel_tol=1e-4), step
