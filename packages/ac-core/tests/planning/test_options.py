"""What can be kept of a block, from what its first step has shown."""

import warnings

import pytest
import torch
from torch import nn

import ac_core
from ac_core.planning.options import KEEP_ALL, kept_sets

PROJECTIONS = ("attention.q", "attention.k", "attention.v", "attention.o")


@pytest.fixture
def sets_of(batch):
    """The sets of a model's first block, learnt in real steps."""

    def learn(model):
        plan = {f"layers.{index}": KEEP_ALL if index == 0 else "none" for index in range(len(model.layers))}
        config = ac_core.ActivationCheckpointingConfig(policy="budget", plan=plan, strict=False)
        ac_core.apply_activation_checkpointing(model, config)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "plan: ")  # of the families that are not there
            for _ in range(2):
                model(**batch).backward()
        return kept_sets(model.layers[0].forward.context_fn.plan)

    return learn


def test_they_are_nested_and_leave_out_what_no_recompute_needs(sets_of, decoder):
    assert sets_of(decoder(2)) == [
        ("attention",),
        ("attention", *PROJECTIONS),
        ("attention", *PROJECTIONS, "mlp.gate"),
        ("attention", *PROJECTIONS, "mlp.gate", "mlp.up"),
    ]


def test_matmuls_of_an_attention_that_cannot_be_kept_as_one_go_together(sets_of, decoder):
    model = decoder(2)
    for layer in model.layers:
        layer.attention.q = nn.Sequential(layer.attention.q, nn.RMSNorm(32))  # what it saves is no call's output
    assert sets_of(model)[:2] == [
        ("attention",),
        ("attention", "attention.q.0", *PROJECTIONS[1:]),
    ]


class Adapted(nn.Module):
    def __init__(self, base, *, scaled):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(32, 1, bias=False), nn.Linear(1, 96, bias=False)
        self.scaled = scaled

    def forward(self, x):
        return self.base(x) * self.up(self.down(x)).sigmoid() if self.scaled else self.base(x) + self.up(self.down(x))


def test_the_wide_matmul_of_an_adapter_is_not_worth_its_bytes(sets_of, decoder):
    model = decoder(2)
    for layer in model.layers:
        layer.mlp.gate = Adapted(layer.mlp.gate, scaled=True)
    assert {name for name in sets_of(model)[-1] if "gate" in name} == {"mlp.gate.base", "mlp.gate.down"}


def test_all_matmuls_of_an_adapter_are_kept_where_that_takes_one_output(sets_of, decoder):
    model = decoder(2)
    for layer in model.layers:
        layer.mlp.gate = Adapted(layer.mlp.gate, scaled=False)
    assert {name for name in sets_of(model)[-1] if "gate" in name} == {f"mlp.gate.{n}" for n in ("base", "down", "up")}


class Functional(nn.Module):
    """An MLP whose products are not modules, as those of grouped experts are not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(32, 32) / 8) for _ in range(2))

    def forward(self, x):
        return (x @ self.first).sigmoid() @ self.second * x


def test_products_without_a_module_are_kept_by_their_family(sets_of, decoder):
    model = decoder(2)
    for layer in model.layers:
        layer.mlp = Functional()
    assert sets_of(model)[-1] == ("attention", "matmul")
    assert all("mlp" not in name for names in sets_of(decoder(2))[:2] for name in names)


def test_without_attention_there_is_no_empty_set(sets_of, decoder):
    model = decoder(2)
    for layer in model.layers:
        layer.attention = nn.Identity()
    assert sets_of(model) == [("mlp.gate",), ("mlp.gate", "mlp.up")]
