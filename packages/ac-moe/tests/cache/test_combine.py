"""The promise: gradients bit for bit those without checkpointing, and one collective fewer per layer."""

import functools
import gc

import pytest
import torch
from ac_moe_model import (
    EXPERTS,
    HIDDEN,
    TOKENS,
    batches,
    build,
    checkpointed,
    checkpointed_as_one,
    collectives,
    differences,
    gradients,
    loss_of,
    plain,
    recompute,
    stats_at_rest,
)
from ac_moe_ranks import Ranks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ac_moe
from ac_moe.cache.region import Region

LAYERS = 3


# ---- gradients, bit for bit


def in_any_order(rank: int) -> tuple[list[str], int, int]:
    """An order that is no pipeline's; those are in test_matrix.py, with everything else that multiplies."""
    order = "f0 f1 f2 b1 f3 b3 b0 b2"
    model, inputs = build(LAYERS), batches(4)
    ac_moe.reset_stats()
    actual = gradients(model, inputs, checkpointed("combine"), order)
    stats = ac_moe.stats()
    return differences(actual, gradients(model, inputs, plain, order)), stats.served, stats.live_entries


def test_microbatches_in_any_order(ranks: Ranks) -> None:
    assert ranks.run(in_any_order) == [([], LAYERS * 4, 0)] * 2


def one_region(rank: int, early_stop: bool) -> tuple[list[str], int]:
    model, inputs = build(LAYERS, "add"), batches(2)
    ac_moe.reset_stats()
    actual = gradients(model, inputs, checkpointed_as_one("combine", early_stop=early_stop))
    served = ac_moe.stats().served
    return differences(actual, gradients(model, inputs, plain)), served


@pytest.mark.parametrize("early_stop", [True, False])
def test_several_layers_in_one_checkpoint(ranks: Ranks, early_stop: bool) -> None:
    # Even with early stop the recompute must pass every combine but the last.
    served = 2 * (LAYERS - 1 if early_stop else LAYERS)
    assert ranks.run(one_region, early_stop=early_stop) == [([], served)] * 2


def shared_dispatcher(rank: int) -> list[str]:
    model, inputs = build(LAYERS), batches(1)
    for layer in model:
        layer.dispatcher = model[0].dispatcher
    return differences(gradients(model, inputs, checkpointed_as_one("combine")), gradients(model, inputs, plain))


def test_layers_that_share_a_dispatcher(ranks: Ranks) -> None:
    assert ranks.run(shared_dispatcher) == [[], []]


def nested(rank: int, outer: str, inner: str, early_stop: bool) -> tuple[list[str], int]:
    def forward(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        inside = functools.partial(checkpointed(inner, early_stop=early_stop), model)
        return recompute(inside, x, outer, early_stop=early_stop)

    model, inputs = build(LAYERS), batches(2)
    ac_moe.reset_stats()
    actual = gradients(model, inputs, forward)
    stats = stats_at_rest()
    assert stats.live_entries == 0
    assert stats.live_bytes == 0
    return differences(actual, gradients(model, inputs, plain)), stats.stored


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    ("outer", "inner", "stored"),
    [
        ("combine", "combine", 2 * LAYERS),  # one tensor per layer, which both regions share
        # Without a cache of their own the layers' recomputes, which come after the outer one, combine for themselves.
        ("combine", "none", 2 * LAYERS),
        # The recompute of the outer block runs the layers' forwards anew, and they keep what they compute.
        # Early stop ends the outer recompute where the last layer begins.
        ("none", "combine", None),
    ],
)
def test_nested_checkpoints(ranks: Ranks, outer: str, inner: str, stored: int | None, early_stop: bool) -> None:
    if stored is None:
        stored = 2 * LAYERS + 2 * (LAYERS - early_stop)
    assert ranks.run(nested, outer=outer, inner=inner, early_stop=early_stop) == [([], stored)] * 2


def twice(rank: int, early_stop: bool) -> tuple[list[str], list[int], int]:
    model, inputs = build(LAYERS), batches(1)

    def run(forward: object) -> tuple[dict[str, torch.Tensor], list[int]]:
        x = inputs[0].detach().clone().requires_grad_()
        model.zero_grad()
        loss = loss_of(forward(model, x))
        live = []
        for again in (True, True, False):
            loss.backward(retain_graph=again)
            live.append(ac_moe.stats().live_entries)  # the loss is held, so is whatever hangs on it
            kept = [e.value for o in gc.get_objects() if type(o) is Region for e in o.kept.values()]
            outputs = [value for value in kept if isinstance(value, torch.Tensor)]
            assert not any(tensor.requires_grad for tensor in outputs), "the recompute's graph hangs on what is kept"
        return {"x": x.grad} | {name: p.grad.clone() for name, p in model.named_parameters()}, live

    ac_moe.reset_stats()
    actual, live = run(checkpointed("combine", early_stop=early_stop))
    served = ac_moe.stats().served
    return differences(actual, run(plain)[0]), live, served


@pytest.mark.parametrize("early_stop", [True, False])
def test_retain_graph(ranks: Ranks, early_stop: bool) -> None:
    assert ranks.run(twice, early_stop=early_stop) == [([], [LAYERS, LAYERS, 0], LAYERS * 3)] * 2


def uneven(rank: int, tokens: tuple[int, int], to: str) -> list[str]:
    model, inputs = build(LAYERS), batches(2, tokens=tokens)
    if to != "all":  # the router sends every token to the experts of one rank
        first = {"rank 0": 0, "rank 1": EXPERTS // 2}[to]
        for layer in model:
            layer.route = functools.partial(to_one_rank, layer, first)
    ac_moe.reset_stats()
    actual = gradients(model, inputs, checkpointed("combine"))
    assert ac_moe.stats().served == LAYERS * 2
    return differences(actual, gradients(model, inputs, plain))


def to_one_rank(layer: torch.nn.Module, first: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.softmax(torch.nn.functional.linear(x, layer.router), -1)[:, first : first + EXPERTS // 2]
    weights, ids = scores.topk(2, -1)
    return ids + first, weights


@pytest.mark.parametrize("to", ["all", "rank 0", "rank 1"])
@pytest.mark.parametrize("tokens", [(5, 8), (0, 6), (7, 0), (0, 0)], ids=str)
def test_uneven_ranks(ranks: Ranks, tokens: tuple[int, int], to: str) -> None:
    assert ranks.run(uneven, tokens=tokens, to=to) == [[], []]


def selective(rank: int, every: int) -> tuple[list[str], int]:
    """A policy that keeps every second matrix product, whose numbers a served combine must not shift."""

    def contexts() -> object:
        seen = 0

        def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            nonlocal seen
            if op is not torch.ops.aten.mm.default:
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen += 1
            return CheckpointPolicy.PREFER_RECOMPUTE if seen % every else CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)

    model, inputs = build(LAYERS), batches(2)
    ac_moe.reset_stats()
    actual = gradients(model, inputs, checkpointed_as_one("combine", inner=contexts))
    served = ac_moe.stats().served
    return differences(actual, gradients(model, inputs, plain)), served


@pytest.mark.parametrize("every", [1, 2, 3])
def test_with_a_selective_policy(ranks: Ranks, every: int) -> None:
    assert ranks.run(selective, every=every) == [([], LAYERS * 2)] * 2


def selective_on(rank: int, names: list[str]) -> list[str]:
    """Saves operators that the dispatcher uses too, in a block that uses them after each combine."""
    ops = [getattr(getattr(torch.ops, space), name).default for space, name in (name.split(".") for name in names)]
    ops = [torch.ops.aten.sum.dim_IntList if op is torch.ops.aten.sum.default else op for op in ops]
    contexts = functools.partial(create_selective_checkpoint_contexts, ops)

    def block(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = layer(x).sin()
            x = x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1)).cos() + x.sum(1, keepdim=True).sin()
        return x

    def forward(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return recompute(functools.partial(block, model), x, "combine", inner=contexts, early_stop=False)

    model, inputs = build(LAYERS), batches(2)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN
    try:
        return differences(gradients(model, inputs, forward), gradients(model, inputs, block))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("names", [["aten.index_select", "aten.sum"], ["c10d.alltoall_base_"]], ids=" ".join)
def test_a_policy_that_names_operators_of_the_dispatcher(ranks: Ranks, names: list[str]) -> None:
    assert ranks.run(selective_on, names=names) == [[], []]


def compiled(rank: int) -> tuple[list[str], int]:
    def forward(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = recompute(torch.compile(layer, backend="eager"), x, "combine")
        return x

    model, inputs = build(2), batches(1)
    ac_moe.reset_stats()
    actual = gradients(model, inputs, forward)
    served = ac_moe.stats().served
    return differences(actual, gradients(model, inputs, plain)), served


def test_compiled_block(ranks: Ranks) -> None:
    assert ranks.run(compiled) == [([], 2)] * 2


# ---- what it saves, costs


def in_backward(rank: int, mode: str | None, form: str, early_stop: bool) -> int:
    model, inputs = build(LAYERS, form), batches(1)
    forward = plain if mode is None else checkpointed(mode, early_stop=early_stop)
    loss = loss_of(forward(model, inputs[0]))
    with collectives() as count:
        loss.backward()
    return count.value


@pytest.mark.parametrize(
    ("form", "early_stop", "none", "combine"),
    [("mul", True, 12, 9), ("mul", False, 12, 9), ("add", False, 12, 9), ("add", True, 9, 9)],
)
def test_collectives_in_the_recompute(ranks: Ranks, form: str, early_stop: bool, none: int, combine: int) -> None:
    """Four per layer (counts, rows, weights, combine), three with the cache."""
    backward = ranks.run(in_backward, mode=None, form=form, early_stop=early_stop)
    assert backward == [3 * LAYERS] * 2
    recomputed = {
        mode: [
            total - alone
            for total, alone in zip(
                ranks.run(in_backward, mode=mode, form=form, early_stop=early_stop), backward, strict=True
            )
        ]
        for mode in ("none", "combine")
    }
    assert recomputed == {"none": [none] * 2, "combine": [combine] * 2}


def counters(rank: int) -> list[ac_moe.Stats]:
    model, inputs = build(LAYERS), batches(2)
    ac_moe.reset_stats()
    losses = [loss_of(checkpointed("combine")(model, x)) for x in inputs]
    seen = [ac_moe.stats()]
    for loss in losses:
        loss.backward()
        seen.append(ac_moe.stats())
    return seen


def test_stats_count_layers_and_microbatches(ranks: Ranks) -> None:
    for tokens, (forward, one, both) in zip(TOKENS, ranks.run(counters), strict=True):
        size = tokens * HIDDEN * 4
        # With each output the routing of its layer, in plain numbers.
        stored = {"stored": 2 * LAYERS, "stored_bytes": 2 * LAYERS * size, "pinned": 2 * LAYERS}
        live = {"live_entries": 2 * LAYERS, "live_bytes": 2 * LAYERS * size, "live_pinned": 2 * LAYERS}
        assert forward == ac_moe.Stats(**stored, **live)
        skipped = {"served": LAYERS, "collectives_skipped": LAYERS}
        live = {name: count // 2 for name, count in live.items()}
        assert one == ac_moe.Stats(**stored, **skipped, **live)
        assert both == ac_moe.Stats(**stored, served=2 * LAYERS, collectives_skipped=2 * LAYERS)
