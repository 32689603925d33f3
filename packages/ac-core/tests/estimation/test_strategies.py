from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ac_core import estimate, plan

SHAPE = {"batch_size": 2, "sequence_length": 32}


@pytest.mark.parametrize("dp_size", [1, 2, 8])
def test_fsdp2_divides_parameters_gradients_and_state(decoder, dp_size):
    whole = estimate(decoder, **SHAPE)
    part = estimate(decoder, **SHAPE, strategy="fsdp2", dp_size=dp_size)
    assert part.parameter_bytes == whole.parameter_bytes // dp_size
    assert part.gradient_bytes == whole.gradient_bytes // dp_size
    assert part.optimizer_bytes == pytest.approx(whole.optimizer_bytes / dp_size, rel=0.03)
    assert part.activation_bytes == whole.activation_bytes
    assert (part.recompute_flops, part.forward_flops) == (whole.recompute_flops, whole.forward_flops)
    assert part.communication_bytes > whole.communication_bytes == 0
    assert sum(part.at_peak.values()) == part.peak_bytes


def test_fsdp2_gathers_a_block_and_what_is_in_no_block(decoder):
    model = decoder()
    found = estimate(decoder, **SHAPE, strategy="fsdp2", dp_size=8)
    block = 2 * sum(p.numel() for p in model.layers[0].parameters())
    rest = found.parameter_bytes * 8 - 4 * block
    # The rest stays gathered; of the blocks two are, the one that runs and the one that comes next, or its buffer.
    assert rest + block < found.communication_bytes < rest + 4 * block


def test_fsdp2_with_mixed_precision_gathers_in_the_dtype_of_the_products(decoder):
    settings = SHAPE | {"strategy": "fsdp2", "dp_size": 8, "dtype": torch.float32}
    wide, mixed = (estimate(decoder, **settings, compute_dtype=dtype) for dtype in (None, torch.bfloat16))
    assert mixed.parameter_bytes == wide.parameter_bytes
    assert mixed.communication_bytes < 0.8 * wide.communication_bytes
    assert mixed.activation_bytes < 0.55 * wide.activation_bytes


def test_ddp_holds_gradients_twice(decoder):
    whole = estimate(decoder, **SHAPE)
    found = estimate(decoder, **SHAPE, strategy="ddp", dp_size=4)
    assert found.communication_bytes == found.gradient_bytes == whole.gradient_bytes
    assert found.peak_bytes == whole.peak_bytes + whole.gradient_bytes


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.up = nn.Parameter(torch.zeros(8, 16, 32))
        self.down = nn.Parameter(torch.zeros(8, 32, 16))

    def forward(self, x, offsets):
        return nn.functional.grouped_mm(nn.functional.grouped_mm(x, self.up, offs=offsets), self.down, offs=offsets)


class _MoE(nn.Module):
    """Two of eight experts a token, and one that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 8, bias=False), _Experts()
        self.shared = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        counts = torch.histc(chosen.flatten().float(), self.experts.num_experts, 0, self.experts.num_experts - 1)
        y = self.experts(rows[order // 2], counts.cumsum(0).int())
        y = torch.zeros_like(y).index_copy(0, order, y).view(-1, 2, 16) * weights[..., None]
        return x + (y.sum(1) + self.shared(rows)).view_as(x)


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(_MoE() for _ in range(2))
        self.lm_head = nn.Linear(16, 64, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def test_experts_are_distributed_and_what_is_routed_to_them_is_not():
    experts = 2 * 2 * 2 * 8 * 16 * 32
    whole = estimate(_Mixture, **SHAPE, policy="none")
    ddp = estimate(_Mixture, **SHAPE, policy="none", strategy="ddp", dp_size=4, ep_size=4)
    assert ddp.parameter_bytes == whole.parameter_bytes - experts * 3 // 4
    assert ddp.activation_bytes == pytest.approx(whole.activation_bytes, rel=0.01)  # the offsets of fewer groups
    assert ddp.forward_flops == whole.forward_flops
    assert "routing is uniform" in str(whole)
    for dp_size, ep_size in ((4, 4), (4, 2), (8, 4)):
        part = estimate(_Mixture, **SHAPE, policy="none", strategy="fsdp2", dp_size=dp_size, ep_size=ep_size)
        assert part.parameter_bytes == whole.parameter_bytes // dp_size
        assert part.activation_bytes == pytest.approx(whole.activation_bytes, rel=0.01)
        gathered = estimate(_Mixture, **SHAPE, policy="none", strategy="fsdp2", dp_size=dp_size).communication_bytes
        assert part.communication_bytes < gathered


def test_a_plan_is_for_its_ranks_share_of_the_experts():
    ranks = {"strategy": "fsdp2", "dp_size": 4, "ep_size": 2, "device": "cpu"}
    found = plan(_Mixture, **SHAPE, budget=0.95, **ranks)
    shown = estimate(_Mixture, **SHAPE, policy=found.to_config(), **ranks)
    assert found.peak_bytes == shown.peak_bytes <= found.budget_bytes
    none, whole = (estimate(_Mixture, **SHAPE, policy="none", **{**ranks, "ep_size": size}) for size in (2, 1))
    assert found.none_peak_bytes == none.peak_bytes != whole.peak_bytes


class _Travelling:
    """Shares experts out as a dispatcher does: their rows go to their ranks and come back."""

    def __init__(self) -> None:
        self.grids = []
        self.regions = 0

    def __call__(self, model, grid):
        self.grids.append(grid.mesh.tolist())
        self.group = grid["ep"].get_group()
        for layer in model.layers:
            experts = layer.experts
            for name, parameter in list(experts.named_parameters()):
                part = parameter.detach().chunk(grid["ep"].size())[0].clone()
                setattr(experts, name, nn.Parameter(DTensor.from_local(part, grid["ep"], [Shard(0)])))
            experts.forward = partial(self.experts, experts)
            if grid["expert_copies"].size() > 1:
                fully_shard(experts, mesh=grid["expert_copies"])
        return self.context_fn

    def context_fn(self):
        self.regions += 1
        return nullcontext(), nullcontext()

    def experts(self, module, rows, offsets):
        # To each rank as many rows as it has experts' worth, and from each as many as this one sends itself.
        ranks = dist.get_world_size(self.group)
        ends = offsets.view(ranks, -1)[:, -1].tolist()
        sent = [end - begin for begin, end in pairwise([0, *ends])]
        mine = _Exchange.apply(rows, sent, [sent[0]] * ranks, self.group)
        up, down = module.up.to_local(), module.down.to_local()
        counts = torch.full((len(up),), mine.shape[0] // len(up))
        y = nn.functional.grouped_mm(mine, up, offs=counts.cumsum(0).int())
        y = nn.functional.grouped_mm(y, down, offs=counts.cumsum(0).int())
        return _Exchange.apply(y, [sent[0]] * ranks, sent, self.group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = received, sent, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, *ctx.back), None, None, None


@pytest.mark.parametrize(("strategy", "dp_size"), [("fsdp2", 2), ("fsdp2", 4), ("ddp", 2)])
def test_how_experts_are_shared_out_is_the_callers_to_say(strategy, dp_size):
    settings = SHAPE | {"strategy": strategy, "dp_size": dp_size, "ep_size": 2, "device": "cpu"}
    share = _Travelling()
    plain = estimate(_Mixture, **settings)
    shared = estimate(_Mixture, **settings, share_experts=share)
    assert share.grids == [[[0, 1]] if dp_size == 2 else [[0, 1], [2, 3]]]
    assert share.regions >= 2  # one for each block that is checkpointed
    assert shared.parameter_bytes == plain.parameter_bytes
    assert shared.optimizer_bytes == plain.optimizer_bytes
    assert shared.activation_bytes == plain.activation_bytes  # the blocks' inputs
    keeping = estimate(_Mixture, **settings, policy="none", share_experts=share)
    assert keeping.activation_bytes > estimate(_Mixture, **settings, policy="none").activation_bytes  # rows travel
    assert "the all-to-all's buffers do not count" in str(plain)
    assert "all-to-all" not in str(shared)
    if strategy == "ddp":  # whose buckets hold no gradients of experts that are shared out
        assert shared.communication_bytes == plain.communication_bytes - 2 * 4 * 2 * 16 * 32 * 2


def test_a_busy_rank_takes_more():
    settings = SHAPE | {"strategy": "fsdp2", "dp_size": 2, "ep_size": 2, "device": "cpu", "policy": "none"}
    even, busy = (estimate(_Mixture, **settings, share_experts=_Travelling(), expert_load=load) for load in (1, 1.5))
    assert busy.activation_bytes > even.activation_bytes
    assert busy.parameter_bytes == even.parameter_bytes
    assert "routing is uniform" in str(even)
    assert "the rank's experts get 1.5 times the rows of an even share" in str(busy)
    del settings["policy"]
    found = plan(_Mixture, **settings, budget=1.0, share_experts=_Travelling(), expert_load=1.5)
    assert found.none_peak_bytes == busy.peak_bytes


def test_sharing_with_nobody_and_loads_of_nobody_are_refused():
    share = _Travelling()
    with pytest.raises(ValueError, match="^share_experts: is given, and ep_size is 1"):
        estimate(_Mixture, **SHAPE, share_experts=share)
    with pytest.raises(ValueError, match="^expert_load: 1.5 needs share_experts="):
        estimate(_Mixture, **SHAPE, strategy="ddp", dp_size=2, ep_size=2, expert_load=1.5)
    with pytest.raises(ValueError, match="^expert_load: 3 is no number from 1, an even share, to 2"):
        plan(_Mixture, **SHAPE, budget=0.5, strategy="ddp", dp_size=2, ep_size=2, share_experts=share, expert_load=3)


def test_experts_that_cannot_be_distributed_are_refused(decoder):
    settings = SHAPE | {"strategy": "ddp"}
    with pytest.raises(RuntimeError, match=r"^ep_size: 8 experts cannot be shared evenly by 3 ranks"):
        estimate(_Mixture, **settings, dp_size=3, ep_size=3)
    with pytest.raises(RuntimeError, match=r"^ep_size: Decoder has no module with its experts in parameters"):
        estimate(decoder, **settings, dp_size=2, ep_size=2)
