"""Activation checkpointing in a training loop of your own: one call before the loop. Needs torch alone."""

import torch
from torch import nn

import ac_core

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(d_model=32, nhead=4, dim_feedforward=64, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)

# Once, before the first step, before or after the optimizer is built: parameters and their names stay the same.
report = ac_core.apply_activation_checkpointing(model, "selective")
print(report)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
runs = []  # for the check at the end: how often the first block runs
model.layers[0].linear1.register_forward_pre_hook(lambda *_: runs.append(1))

STEPS = 3
for step in range(STEPS):
    loss = model(torch.randn(2, 16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}  loss {loss.item():.4f}")

assert len(runs) == 2 * STEPS, runs
print("checkpointing was on: the first block ran twice a step")

with torch.no_grad():  # nothing is kept here, so nothing is checkpointed
    model(torch.randn(2, 16, 32))

# What is saved is the plain model's, so that either loads the other's.
assert "layers.0.linear1.weight" in model.state_dict()
