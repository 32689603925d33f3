"""Activation checkpointing with Accelerate: apply before `prepare`. On one process or several:

python accelerate_loop.py
accelerate launch --cpu --num_processes 2 accelerate_loop.py

pip install ac-core transformers accelerate
"""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import ac_core

# On GPUs leave `cpu=True` out. With a FullyShardedDataParallelPlugin, keep its activation_checkpointing=False: it would
# wrap the same blocks in a second checkpoint, which ac-core refuses in the first step.
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
)
accelerator.print(ac_core.apply_activation_checkpointing(model, "selective"))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = [torch.randint(128, (16,)) for _ in range(16)]
loader = torch.utils.data.DataLoader([{"input_ids": ids, "labels": ids} for ids in tokens], batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

plain = accelerator.unwrap_model(model)  # the module that was prepared, still checkpointed
runs = []  # for the check below: how often the first block runs
plain.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))

for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.4f}")

assert len(runs) == 2 * len(loader), runs
accelerator.print("checkpointing was on: the first block ran twice a batch")

accelerator.save_state("state")  # the same names as without checkpointing: either may load the other's state
accelerator.wait_for_everyone()
accelerator.load_state("state")

ac_core.remove_activation_checkpointing(model)
assert plain.config.use_cache  # turned off by apply, and back as it was
