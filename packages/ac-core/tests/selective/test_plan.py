import pytest
import torch
from torch import nn

from ac_core.selective import context
from ac_core.selective.families import kind_of
from ac_core.selective.plan import FORWARD
from ac_core.selective.rule import SaveRule


def names(plan):
    return {path for path, _, _ in plan.decision.calls}


def test_the_default_keeps_attention_as_one_call_and_part_of_the_matmuls(decoder, selective, plan_of, train_step):
    model = selective(decoder())
    for _ in range(2):
        train_step(model)
    plans = [plan_of(model, index) for index in range(4)]
    assert all(plan.decision.modules == {"attention"} for plan in plans)
    assert [names(plan) for plan in plans] == [set(), {"mlp.gate"}, {"mlp.gate"}, set()]


def test_an_output_that_nobody_needs_is_learnt(decoder, selective, plan_of, train_step):
    model = selective(decoder(), ("matmul",))
    assert ("mlp.down", FORWARD, 0) in plan_of(model, 0).sites
    for _ in range(2):
        train_step(model)
    assert "mlp.down" not in names(plan_of(model, 0))
    model = selective(decoder(), ("matmul",), early_stop=False)
    for _ in range(2):
        train_step(model)
    assert "mlp.down" in names(plan_of(model, 0))  # without early stop it is run again: keeping it pays


def test_eager_attention_is_not_kept_as_one_call(decoder, selective, plan_of, train_step):
    model = selective(decoder(fused=False))
    for _ in range(2):
        train_step(model)
    assert plan_of(model, 1).decision.modules == frozenset()  # its probabilities are the square of the sequence


def test_attention_that_is_not_fused_after_all_is_kept_once_at_most(decoder, selective, monkeypatch):
    # With dropout the CPU runs it as matmuls. 128 tokens and heads of 8: the probabilities are 16 times the output.
    regions = []

    class Watched(context.Region):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            regions.append(self)

    monkeypatch.setattr(context, "Region", Watched)
    selective(decoder(dropout=0.1))(torch.zeros(1, 128, dtype=torch.long))
    assert [any("scaled_dot" in what for _, what, _ in region.kept) for region in regions] == [True, *[False] * 3]


def test_what_is_not_needed_any_more_and_what_is_needed_again(selective, plan_of, train_step):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.square = False

        def forward(self, x):
            y = self.b(self.a(x).relu())
            return x + (y * y if self.square else y)

    model = nn.Module()
    model = _Wrapped(nn.ModuleList(Block() for _ in range(2)))
    selective(model, ("matmul",))
    for _ in range(2):
        train_step(model)
    assert names(plan_of(model, 0)) == {"a"}
    for square, expected in ((True, {"a", "b"}), (False, {"a"})):
        for block in model.layers:
            block.square = square
        for _ in range(2):
            train_step(model)
        train_step(model)
        assert names(plan_of(model, 0)) == expected


class _Wrapped(nn.Module):
    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(32, 16), layers

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_fewer_ops_run_and_fewer_bytes_are_saved(decoder, selective, train_step, matmuls, saved_bytes):
    import ac_core

    plain, full, model = decoder(), decoder(), selective(decoder())
    ac_core.apply_activation_checkpointing(full, "full")
    for _ in range(2):
        train_step(model)
    models = {"none": plain, "full": full, "ours": model}
    counts = {name: matmuls(lambda m=m: train_step(m)) for name, m in models.items()}
    mm = {name: ops.count("mm") for name, ops in counts.items()}
    assert [ops.count("attention") for ops in counts.values()] == [4, 8, 4]
    assert mm["full"] - mm["none"] == 4 * 6  # all but the down projection
    assert mm["ours"] - mm["none"] == 4 * 2 - 2  # gate and up, two gates kept
    assert saved_bytes(full) < saved_bytes(model) < 0.6 * saved_bytes(plain)


@pytest.mark.parametrize("save", [("mlp",), ("layers.*.mlp",), ("attention.q", "mlp.*")], ids=str)
def test_modules_by_glob(decoder, selective, plan_of, save):
    plan = plan_of(selective(decoder(), save), 1)
    expected = {"mlp"} if "mlp" in save[0] else {"attention.q", "mlp.gate", "mlp.up", "mlp.down"}
    assert set(plan.named) == expected


def test_the_rule_sorts_its_names():
    rule = SaveRule.of(("attention", "aten::mm.default", "mlp.*"))
    assert (rule.families, rule.ops, rule.globs) == ({"attention"}, {"aten::mm"}, ("mlp.*",))
    assert rule.keeps(kind_of(torch.nn.functional.linear))
    assert not rule.keeps(kind_of(torch.topk))


def test_experts_are_left_to_the_recompute_by_default(decoder, selective, plan_of, train_step):
    model = selective(decoder(moe=True))
    for _ in range(2):
        train_step(model)
    kept = names(plan_of(model, 1))
    assert not any(path.startswith("mlp.experts.") for path in kept if "." in path)
