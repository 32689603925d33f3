"""ac-core checkpoints blocks with ac-moe's cache around them, neither knowing the other: the contract's context_fn."""

import subprocess
import sys
from textwrap import dedent

SCRIPT = """
import copy, itertools, os, ac_core, ac_moe, torch, torch.distributed as dist
from torch.nn.functional import silu

dist.init_process_group("gloo")
rank = dist.get_rank()

class Experts(torch.nn.Module):
    def __init__(self, local):
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(local, 16, 64) * 0.2)
        self.down = torch.nn.Parameter(torch.randn(local, 32, 16) * 0.2)

    def forward(self, sent):
        offsets = sent.tokens_per_expert.cumsum(0).int()
        gate, up = ac_moe.experts.grouped_mm(sent.rows, self.up, offsets).chunk(2, -1)
        return ac_moe.experts.down_projection(silu(gate) * up * sent.weights[:, None], self.down, offsets)

class MoEBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dispatcher = ac_moe.AllToAllDispatcher(num_experts=4)
        self.router = torch.nn.Linear(16, 4)
        self.mixed = torch.nn.Linear(16, 16)
        self.scale = torch.nn.Parameter(torch.full((16,), 0.5))
        self.experts = Experts(len(self.dispatcher.local_experts))

    def forward(self, x):
        x = x + silu(self.mixed(x))
        weights, ids = self.router(x).softmax(-1).topk(2)
        sent = self.dispatcher.dispatch(x, ids, weights)
        return x + self.scale * self.dispatcher.combine(self.experts(sent), sent)

torch.manual_seed(rank)
plain = torch.nn.Sequential(MoEBlock(), MoEBlock(), MoEBlock())
x = torch.randn(5 + 3 * rank, 16)

def step(model):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]

expected = step(plain)
for policy, mode in itertools.product(("full", "selective"), ("none", "combine", "moe_tail")):
    model = copy.deepcopy(plain)
    report = ac_core.apply_activation_checkpointing(model, policy, context_fn=ac_moe.context_fn(mode))
    assert report.applied_blocks == ("0", "1", "2")
    for number in range(3):  # selective looks at the first step, and keeps from the second on
        ac_moe.reset_stats()
        gradients = step(model)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)), (policy, mode, number)
        stats = ac_moe.stats()
        kept, tail = 3 * (mode != "none"), 3 * (mode == "moe_tail")
        counts = (stats.stored, stats.served, stats.gemms_skipped, stats.live_entries)
        assert counts == (kept, kept, tail, 0), (policy, mode, number, stats)
dist.barrier()
os._exit(0)  # docs/facts.md: gloo may abort or hang when its group is destroyed
"""


def test_two_ranks_with_every_mode_under_full_and_selective_checkpointing(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
