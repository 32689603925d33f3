"""Activation checkpointing with Lightning Fabric: apply before `fabric.setup`.

pip install ac-core lightning
"""

import tempfile

import torch
from lightning.fabric import Fabric
from torch import nn

import ac_core

# With an FSDPStrategy leave `activation_checkpointing_policy` out: it would wrap the same blocks in a second
# checkpoint, which ac-core refuses in the first step.
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(d_model=32, nhead=4, dim_feedforward=64, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
print(ac_core.apply_activation_checkpointing(model, "full"))

runs = []  # for the check at the end: how often the first block runs
model.layers[0].linear1.register_forward_pre_hook(lambda *_: runs.append(1))

model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

STEPS = 3
for step in range(STEPS):
    loss = model(torch.randn(2, 16, 32)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}  loss {loss.item():.4f}")

assert len(runs) == 2 * STEPS, runs
print("checkpointing was on: the first block ran twice a step")

with tempfile.TemporaryDirectory() as folder:
    fabric.save(f"{folder}/state.ckpt", {"model": model, "optimizer": optimizer})
    fabric.load(f"{folder}/state.ckpt", {"model": model, "optimizer": optimizer})
