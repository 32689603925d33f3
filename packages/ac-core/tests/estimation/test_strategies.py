import pytest
import torch
from torch import nn

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


def test_experts_that_cannot_be_distributed_are_refused(decoder):
    settings = SHAPE | {"strategy": "ddp"}
    with pytest.raises(RuntimeError, match=r"^ep_size: 8 experts cannot be shared evenly by 3 ranks"):
        estimate(_Mixture, **settings, dp_size=3, ep_size=3)
    with pytest.raises(RuntimeError, match=r"^ep_size: Decoder has no module with its experts in parameters"):
        estimate(decoder, **settings, dp_size=2, ep_size=2)
