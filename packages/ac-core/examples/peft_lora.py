"""Activation checkpointing of a frozen model with LoRA adapters: apply before or after `get_peft_model`.

pip install ac-core transformers peft
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ac_core

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
)
# For a quantised model, before this: prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4))
# No enable_input_require_grads(), nor any other hook on the embeddings: ac-core never uses reentrant checkpoints.
print(ac_core.apply_activation_checkpointing(model, "full"))

adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2)
runs = []  # for the check at the end: how often the first block runs
model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))

STEPS = 3
for step in range(STEPS):
    ids = torch.randint(128, (2, 16))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    without = [name for name, p in adapters.items() if p.grad is None]
    assert not without, without
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}  loss {loss.item():.4f}  gradients for all {len(adapters)} adapter weights")

assert len(runs) == 2 * STEPS, runs
print("checkpointing was on: the first block ran twice a step")

merged = model.merge_and_unload()  # the plain model with the adapters in its weights, checkpointed as before
ac_core.remove_activation_checkpointing(merged)
