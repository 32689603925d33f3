"""Activation checkpointing in the Hugging Face Trainer: apply to the model, leave the Trainer's own setting off.

pip install ac-core transformers accelerate
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ac_core

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, use_cache=True
)
model = LlamaForCausalLM(config)
tokens = [torch.randint(128, (16,)) for _ in range(16)]
dataset = [{"input_ids": ids, "labels": ids} for ids in tokens]

# Before the Trainer is built, so that the report is the first thing you see; afterwards works as well. With
# `model_init=`, apply inside that function.
print(ac_core.apply_activation_checkpointing(model, "full"))

runs = []  # for the check at the end: how often the first block runs
model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        # activation_checkpointing=True (gradient_checkpointing=True in older versions) would be a second
        # checkpointing of the same blocks. ac-core refuses it in the first step.
        activation_checkpointing=False,
        # Under DDP the Trainer looks for unused parameters unless its own checkpointing is on. That is a walk through
        # the graph in every step; a model that uses all of its parameters does not need it.
        ddp_find_unused_parameters=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=dataset, eval_dataset=dataset)
    trainer.train()
    assert len(runs) == 2 * 3, runs
    print("checkpointing was on: the first block ran twice a step")

    trainer.evaluate()  # without gradients: nothing is recomputed

    # The weights and their names are those of the plain model. `use_cache` is off while checkpointing is on (the
    # Trainer turns it off in any case), and would be written so; `remove` first, and it is what it was.
    ac_core.remove_activation_checkpointing(model)
    trainer.save_model(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).config.use_cache
