"""ac-core checkpoints blocks with ac-moe's cache around them, neither knowing the other: the contract's context_fn."""

import subprocess
import sys
from textwrap import dedent

SCRIPT = """
import copy, os, ac_core, ac_moe, torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

class MoEBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dispatcher = ac_moe.AllToAllDispatcher(num_experts=4)
        self.router = torch.nn.Linear(16, 4)
        self.scale = torch.nn.Parameter(torch.full((16,), 0.5))
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in self.dispatcher.local_experts)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2)
        sent = self.dispatcher.dispatch(x, ids, weights)
        parts = zip(self.experts, sent.rows.split(sent.splits), sent.weights.split(sent.splits))
        rows = torch.cat([torch.tanh(expert(r)) * w[:, None] for expert, r, w in parts])
        return x + self.scale * self.dispatcher.combine(rows, sent)

torch.manual_seed(rank)
plain = torch.nn.Sequential(MoEBlock(), MoEBlock(), MoEBlock())
x = torch.randn(5 + 3 * rank, 16)
gradients = {}
for mode in ("off", "none", "combine"):
    model = copy.deepcopy(plain)
    if mode != "off":
        report = ac_core.apply_activation_checkpointing(model, "full", context_fn=ac_moe.context_fn(mode))
        assert report.applied_blocks == ("0", "1", "2")
    ac_moe.reset_stats()
    model(x).square().sum().backward()
    gradients[mode] = [p.grad for p in model.parameters()]
    stats = ac_moe.stats()
    kept = 3 if mode == "combine" else 0
    assert (stats.stored, stats.served, stats.live_entries) == (kept, kept, 0), stats
assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients.values()))
dist.barrier()
os._exit(0)  # docs/facts.md: gloo may abort or hang when its group is destroyed
"""


def test_two_ranks_full_checkpointing_with_the_combine_cache(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
