"""DDP and FSDP2 on two gloo ranks: equal is found equal, a difference is found, and the sharded model trains on.

Run as a script, this file is one rank.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ac_core import apply_activation_checkpointing, measure, verify

WIDTH, TOKENS, DEPTH = 64, 256, 4


class Block(nn.Module):
    """Wrong in its recompute on request: then what it saves there is twice as large."""

    wrong = False

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        scale = 2 if self.wrong and torch._C._current_graph_task_id() != -1 else 1
        return x + self.down(torch.dropout(self.up(self.norm(x)).sin() * scale, 0.1, self.training))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 8)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        self.mean.lerp_(x.detach().float().mean(), 0.1)
        return self.head(x)


def fsdp2(model, **options):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def mixed_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


WRAPPED = {
    "ddp": DistributedDataParallel,
    "ddp, static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "ddp, gradients as views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "fsdp2": fsdp2,
    "fsdp2, gathered until the backward": lambda model: fsdp2(model, reshard_after_forward=False),
    "fsdp2, bf16": lambda model: fsdp2(model, mp_policy=mixed_precision()),
}


def one_rank(rank):
    """What the parent asserts on, as plain data."""
    torch.manual_seed(rank)
    x = torch.randn(TOKENS, 8)
    found = {}
    for name, wrap in WRAPPED.items():
        fresh = wrap(Model())
        first, second = (measure(fresh, x) for _ in range(2))
        model = wrap(Model())
        if name == "fsdp2":
            model(x)  # leaves parameters gathered
        equal = verify(model, x)
        untouched = all(p.grad is None for p in model.parameters())
        Block.wrong = True
        wrong = verify(model, x)
        Block.wrong = False
        plain = measure(model, x)
        apply_activation_checkpointing(model)
        full = measure(model, x)
        model(x).sum().backward()  # it trains on
        grads = sum(p.grad is not None for p in model.parameters())
        found[name] = {
            "equal": str(equal),
            "is equal": equal.equal,
            "untouched": untouched,
            "compared": equal.gradients.compared,
            "wrong": sorted(wrong.gradients.names),
            "loss": bool(wrong.loss),
            "deterministic": wrong.deterministic,
            "repeats": first == second == plain,
            "plain": plain.to_dict(),
            "full": full.to_dict(),
            "gradients": grads,
        }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By rank and wrapper, what `one_rank` returned."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(params=WRAPPED)
def of_each_rank(found, request):
    return [of_rank[request.param] for of_rank in found]


def test_equal_and_untouched(of_each_rank):
    parameters = len(list(Model().parameters()))
    for result in of_each_rank:
        assert result["is equal"], result["equal"]
        assert result["untouched"]
        assert result["compared"] == result["gradients"] == parameters


def test_a_wrong_recompute_is_found_on_every_rank(of_each_rank):
    for result in of_each_rank:
        assert result["loss"]
        assert result["deterministic"]
        assert any("layers.3.down.weight" in name for name in result["wrong"])
        assert not any("head" in name for name in result["wrong"])


def test_bytes_and_flops_are_those_of_one_process(found):
    """Gathered parameters, buckets and shards are no saved bytes. In bf16 the boundaries are half as large."""
    model, x = Model(), torch.randn(TOKENS, 8)
    plain = measure(model, x)
    apply_activation_checkpointing(model)
    full = measure(model, x)
    for of_rank in found:
        for name, result in of_rank.items():
            for alone, wrapped in ((plain, result["plain"]), (full, result["full"])):
                assert result["repeats"], name
                assert wrapped["recompute_flops"] == alone.recompute_flops, name
                assert wrapped["forward_flops"] == alone.forward_flops, name
                assert wrapped["saved_bytes"] == alone.saved_bytes or name == "fsdp2, bf16", name
        assert 0.5 <= of_rank["fsdp2, bf16"]["full"]["saved_bytes"] / full.saved_bytes < 0.8


if __name__ == "__main__":
    number, files = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(files / "store"), 2), rank=number, world_size=2)
    (files / f"{number}.json").write_text(json.dumps(one_rank(number)))
    dist.barrier()
    os._exit(0)  # gloo's end can abort or hang
