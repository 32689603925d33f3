"""`FullyShardedDataParallel`, which Accelerate and Lightning still use: the same run with checkpointing as without."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """\
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from ac_core import apply_activation_checkpointing
from conftest import MLPBlock, Stack

dist.init_process_group("gloo")

def train(policy, original):
    torch.manual_seed(0)
    model, runs, seen = Stack(dropout=0.1), [], []
    apply_activation_checkpointing(model, policy)
    model.layers[0].norm.register_forward_hook(lambda *_: runs.append(1))
    model = FSDP(
        model, auto_wrap_policy=ModuleWrapPolicy({MLPBlock}),
        device_id=torch.device("cpu"), use_orig_params=original,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        loss = model((torch.arange(24).reshape(2, 12) + dist.get_rank()) % 32).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    with FSDP.summon_full_params(model):
        return len(runs), seen + [p.detach().clone() for p in model.parameters()]

for original in (True, False):
    runs, plain = train("none", original)
    assert runs == 3, runs
    for policy in ("full", "selective"):
        runs, seen = train(policy, original)
        assert runs == 6, (policy, runs)
        assert all(map(torch.equal, plain, seen)), (policy, original)
print("equal", flush=True)
os._exit(0)  # ranks that have used gloo may be aborted in the interpreter's finalisation
"""


def test_two_ranks_with_original_and_with_flat_parameters(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2
