"""A Hugging Face MoE model: experts shared out by ac-moe, blocks checkpointed by ac-core or by transformers itself."""

import subprocess
import sys
from textwrap import dedent

import pytest

SCRIPT = """
import os, ac_core, ac_moe, torch, transformers, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
config = transformers.DeepseekV3Config(
    vocab_size=64, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
    first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
)
tokens = torch.randint(2, 64, (2, 5 + 3 * rank), generator=torch.Generator().manual_seed(rank))

def gradients(checkpointing, cache="none"):
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).train()
    sharded = ac_moe.parallelize(model, mesh, dispatcher_recompute_cache=cache)
    if checkpointing == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": sharded.context_fn})
    elif checkpointing:
        report = ac_core.apply_activation_checkpointing(model, checkpointing, context_fn=sharded.context_fn)
        assert report.applied_blocks == ("model.layers.0", "model.layers.1"), report
    for step in range(3):  # selective learns in its first steps
        model.zero_grad()
        ac_moe.reset_stats()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        stats = ac_moe.stats()
        assert stats.live_entries == 0, stats
    if checkpointing in ("full", "transformers") and cache != "none":
        assert stats.served == 2, stats
    return {n: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}

plain = gradients(None)
assert all(g.any() for n, g in plain.items() if "e_score" not in n)
for checkpointing in ("full", "selective", "transformers"):
    for cache in ("none", "combine", "moe_tail"):
        got = gradients(checkpointing, cache)
        differ = [name for name in plain if not torch.equal(plain[name], got[name])]
        assert not differ, (checkpointing, cache, differ)
dist.barrier()
os._exit(0)  # docs/facts.md: gloo may abort or hang when its group is destroyed
"""


def test_two_ranks_bitwise_under_every_policy(tmp_path):
    pytest.importorskip("transformers")
    script = tmp_path / "ranks.py"
    script.write_text(dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
