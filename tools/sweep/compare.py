"""One class: a training step with checkpointing against the same step without, bit for bit."""

import random
import traceback
from dataclasses import asdict, dataclass, field

import numpy
import torch
from torch import Tensor, nn

from ac_core import apply_activation_checkpointing, find_blocks
from ac_core.region.cache import turn_cache_off, turn_cache_on
from tools.sweep.inputs import make_inputs
from tools.sweep.models import tiny_model

@dataclass
class Result:
    name: str
    kind: str
    outcome: str = ""
    reason: str = ""
    parameters: int = 0
    media: list = field(default_factory=list)
    towers: dict = field(default_factory=dict)
    blocks: int = 0
    recomputed: int = 0

@dataclass
class Step:
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    rng: Tensor

def step(model, inputs, buffers):
    for name, b in model.named_buffers():
        if name in buffers and b.shape == buffers[name].shape: 
            b.copy_(buffers[name])
    model.zero_grad(set_to_none=True)
    random.seed(7); numpy.random.seed(7); torch.manual_seed(7)
    out = model(**inputs)
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = (out.logits if hasattr(out, "logits") else out[0]).float().square().mean()
    loss.backward()
    return Step(loss.detach(), {n: p.grad.clone() for n,p in model.named_parameters() if p.grad is not None},
        {n: b.clone() for n,b in model.named_buffers()}, torch.get_rng_state())

def differences(a, b):
    out = []
    if not torch.equal(a.loss, b.loss): out.append(f"loss {(a.loss-b.loss).abs().item():.1e}")
    for what in ("gradients", "buffers"):
        x, y = getattr(a, what), getattr(b, what)
        if x.keys() != y.keys(): out.append(f"{what}: missing {sorted(x.keys() ^ y.keys())[:3]}")
        bad = [n for n in x if n in y and not torch.equal(x[n], y[n])]
        if bad: out.append(f"{what}: {len(bad)} of {len(x)} differ, first {bad[0]}")
    if a.rng is not None and not torch.equal(a.rng, b.rng): out.append("rng")
    return out

class Calls:
    def __init__(self, model, blocks):
        self.count = {}
        self.leaves = {}
        for b in blocks:
            self.leaves[b.name] = [m for m in b.module.modules() if m is not b.module]
            for m in self.leaves[b.name]:
                m.register_forward_pre_hook(self.hook)
    def hook(self, m, args):
        self.count[m] = self.count.get(m, 0) + 1
    def take(self):
        c, self.count = self.count, {}
        return c

def compare(name, kind, policy, dropout=0.0, limit=8_000_000):
    r = Result(name, kind)
    stage = "build"
    try:
        model = tiny_model(name, dropout)
        r.parameters = sum(p.numel() for p in model.parameters())
        if r.parameters > limit:
            r.outcome, r.reason = "skipped", f"{r.parameters/1e6:.1f}M parameters"
            return r
        stage = "inputs"
        torch.manual_seed(1)
        inputs = make_inputs(model)
        r.media = sorted(n for n in inputs if n.startswith(("pixel_values", "input_features", "input_values", "flattened")))
        stage = "plain step"
        configs = turn_cache_off(model)
        buffers = {n: b.clone() for n,b in model.named_buffers()}
        blocks = find_blocks(model)
        calls = Calls(model, blocks)
        plain = step(model, inputs, buffers)
        before = calls.take()
        if not torch.isfinite(plain.loss):
            r.outcome, r.reason = "skipped", "loss is not finite"
            return r
        for b in blocks:
            reached = any(g is not None and bool(g.any()) for g in (p.grad for p in b.module.parameters()))
            r.towers[b.part] = r.towers.get(b.part, False) or reached
        again = step(model, inputs, buffers)
        if not torch.equal(plain.rng, again.rng): plain.rng = None
        if diff := differences(plain, again):
            r.outcome, r.reason = "nondeterministic", "; ".join(diff)
            return r
        turn_cache_on(configs)
        stage = policy
        report = apply_activation_checkpointing(model, policy)
        r.blocks = len(report.applied_blocks)
        calls.take()
        ac = step(model, inputs, buffers)
        after = calls.take()
        r.recomputed = sum(any(after.get(m,0) > before.get(m,0) for m in calls.leaves[n]) for n in report.applied_blocks)
        diff = differences(plain, ac)
        r.outcome, r.reason = ("different", "; ".join(diff)) if diff else ("equal", "")
    except Exception as e:
        r.outcome = {"build": "unbuilt", "inputs": "no inputs", "plain step": "does not train"}.get(stage, "failed")
        tb = traceback.extract_tb(e.__traceback__)[-1]
        r.reason = f"{type(e).__name__}: {' '.join(str(e).split())[:200]} @{tb.filename.rsplit('/',1)[-1]}:{tb.lineno}"
    return r
