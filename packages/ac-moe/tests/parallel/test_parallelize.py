"""Expert parallelism against the same model in one process: gradients, checkpoints of blocks, orders, wrappers."""

import copy
import gc
import re
import warnings
import weakref

import ac_moe_hf as hf
import pytest
import torch
import torch.distributed as dist
from ac_moe_ranks import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import noop_context_fn

import ac_moe

EXACT = 1e-12  # float64
ORDERS = {  # forwards and backwards of four microbatches
    "1f1b": "f0 f1 b0 f2 b1 f3 b2 b3",
    "last in first out": "f0 f1 f2 f3 b3 b2 b1 b0",
    "interleaved": "f0 f1 f2 b1 f3 b3 b0 b2",
}
families = pytest.mark.parametrize("family", hf.FAMILIES)


@pytest.fixture(autouse=True)
def _transformers() -> None:
    pytest.importorskip("transformers")


def step_without_and_with_checkpoints(rank: int, family: str) -> dict[str, float]:
    """Two microbatches; the largest error of a gradient for each way to run the blocks."""
    expected = hf.one_process(hf.build(family), microbatches=2)
    errors = {}
    for mode in ("no checkpoint", "none", "combine", "moe_tail"):
        model = hf.build(family)
        if mode == "moe_tail" and family == "GptOss":
            continue
        cache = "none" if mode == "no checkpoint" else mode
        sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache=cache)
        if mode != "no checkpoint":
            hf.checkpoint_layers(model, sharded.context_fn)
        for number in range(2):
            hf.loss_of(model, hf.batch(rank, number)).backward()
        hf.average_dense_gradients(model)
        errors[mode] = hf.furthest(hf.gradients(model), expected)
    return errors


@families
def test_gradients_are_those_of_one_process(ranks: Ranks, family: str) -> None:
    for errors in ranks.run(step_without_and_with_checkpoints, family=family):
        assert len(errors) == (3 if family == "GptOss" else 4)
        assert max(errors.values()) < EXACT, errors


def fp32_step(rank: int, family: str) -> tuple[float, float]:
    expected = hf.one_process(hf.build(family, torch.float32))
    model = hf.build(family, torch.float32)
    ac_moe.parallelize(model, hf.mesh(2))
    hf.loss_of(model, hf.batch(rank)).backward()
    hf.average_dense_gradients(model)
    actual = hf.gradients(model)
    return max((actual[key] - wanted).abs().max().item() for key, wanted in expected.items()), hf.furthest(
        actual, expected
    )


@families
def test_fp32(ranks: Ranks, family: str) -> None:
    for absolute, relative in ranks.run(fp32_step, family=family):
        assert absolute < 1e-6
        assert relative < 1e-5  # transformers' own implementations of experts differ by 2e-6 here


def steps_in_order(rank: int, schedule: str) -> list[str]:
    """DeepSeek, whose shared experts come after the combine, so that each cached output is served."""
    results = []
    for order in ("f0 b0 f1 b1 f2 b2 f3 b3", schedule):
        model = hf.build("DeepseekV3")
        sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="moe_tail")
        hf.checkpoint_layers(model, sharded.context_fn, early_stop=False)
        losses, found = {}, {}
        for step in order.split():
            number = int(step[1:])
            if step[0] == "f":
                losses[number] = hf.loss_of(model, hf.batch(rank, number))
                continue
            model.zero_grad()
            losses.pop(number).backward()
            found |= {(number, key): gradient.clone() for key, gradient in hf.gradients(model).items()}
        results.append(found)
    one, other = results
    assert len(one) > 4 * 20
    return [str(key) for key in one if not torch.equal(one[key], other[key])]


@pytest.mark.parametrize("schedule", ORDERS)
def test_microbatches_in_flight_are_exact_in_any_order(ranks: Ranks, schedule: str) -> None:
    assert ranks.run(steps_in_order, schedule=ORDERS[schedule]) == [[], []]


def cache_serves(rank: int, family: str, early_stop: bool) -> tuple[int, int, int]:
    model = hf.build(family)
    sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="moe_tail")
    hf.checkpoint_layers(model, sharded.context_fn, early_stop=early_stop)
    ac_moe.reset_stats()
    hf.loss_of(model, hf.batch(rank)).backward()
    stats = ac_moe.stats()
    return stats.stored, stats.served, stats.live_entries


@pytest.mark.parametrize(
    ("family", "early_stop", "served"),
    [
        ("Mixtral", True, 0),  # ends in `residual + moe`, which early stop never reaches
        ("Mixtral", False, hf.LAYERS),
        ("DeepseekV3", True, hf.LAYERS),  # has its shared experts after the combine
        ("DeepseekV3", False, hf.LAYERS),
    ],
)
def test_recompute_is_served(ranks: Ranks, family: str, early_stop: bool, served: int) -> None:
    assert ranks.run(cache_serves, family=family, early_stop=early_stop) == [(hf.LAYERS, served, 0)] * 2


def warned(rank: int, context: str) -> list[str]:
    """The warnings of a step in which layers are checkpointed, with or without what `parallelize` gives for it."""
    model = hf.StandIn()
    sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="combine")
    if context != "no checkpoint":
        hf.checkpoint_layers(model, sharded.context_fn if context == "given" else noop_context_fn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.loss_of(model, hf.batch(rank)).backward()
    return [str(warning.message) for warning in caught if "ac_moe" in str(warning.message)]


@pytest.mark.parametrize(("context", "times"), [("no checkpoint", 0), ("given", 0), ("forgotten", hf.LAYERS)])
def test_a_checkpoint_without_the_context_is_told(ranks: Ranks, context: str, times: int) -> None:
    for told in ranks.run(warned, context=context):
        assert len(told) == times
        assert all("dispatcher_recompute_cache is not applied" in text for text in told)


def over_hybridep(rank: int, family: str) -> tuple[float, int]:
    expected = hf.one_process(hf.build(family, torch.float32))
    model = hf.build(family, torch.float32)
    sharded = ac_moe.parallelize(
        model,
        hf.mesh(2),
        dispatcher="hybridep",
        dispatcher_options={"buffer": ac_moe.reference.HybridEPBuffer, "pad_multiple": 4},
        dispatcher_recompute_cache="combine" if family == "GptOss" else "moe_tail",
    )
    hf.checkpoint_layers(model, sharded.context_fn, early_stop=False)
    ac_moe.reset_stats()
    hf.loss_of(model, hf.batch(rank)).backward()
    served = ac_moe.stats().served
    hf.average_dense_gradients(model)
    return hf.furthest(hf.gradients(model), expected), served


@families
def test_over_hybridep(ranks: Ranks, family: str) -> None:
    for error, served in ranks.run(over_hybridep, family=family):
        assert error < 1e-5
        assert served == hf.LAYERS


def inputs_after_backward(rank: int) -> tuple[int, int]:
    """How many inputs of experts there were, and how many are alive after the backward, with the loss still held."""
    model = hf.build("DeepseekV3")
    sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="moe_tail")
    hf.checkpoint_layers(model, sharded.context_fn)
    seen = []
    for layer in sharded.layers:
        layer.module.register_forward_pre_hook(lambda _, args: seen.extend(map(weakref.ref, args)))
    loss = hf.loss_of(model, hf.batch(rank))
    gc.disable()
    try:
        loss.backward()
        return len(seen), sum(reference() is not None for reference in seen)
    finally:
        gc.enable()


def test_no_input_outlives_the_backward(ranks: Ranks) -> None:
    # Three arguments, of each layer, in the forward and in the recompute.
    assert ranks.run(inputs_after_backward) == [(3 * hf.LAYERS * 2, 0)] * 2


def sum_reduction(rank: int) -> float:
    expected = hf.one_process(hf.build("Mixtral"))
    model = hf.build("Mixtral")
    ac_moe.parallelize(model, hf.mesh(2), gradient_reduction="sum")
    (hf.loss_of(model, hf.batch(rank)) / 2).backward()
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
    return hf.furthest(hf.gradients(model), expected)


def test_gradients_summed_over_ranks(ranks: Ranks) -> None:
    assert max(ranks.run(sum_reduction)) < EXACT


def step_with_router_losses(rank: int) -> float:
    """The auxiliary loss of a rank is that of its own tokens, as with data parallelism; and so is the reference."""
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    expected = hf.one_process(hf.build("Mixtral", **options))
    without = hf.one_process(hf.build("Mixtral"))
    model = hf.build("Mixtral", **options)
    sharded = ac_moe.parallelize(model, hf.mesh(2))
    hf.checkpoint_layers(model, sharded.context_fn)
    hf.loss_of(model, hf.batch(rank)).backward()
    hf.average_dense_gradients(model)
    gate = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(expected[gate], without[gate]), "the auxiliary loss has no effect here"
    return hf.furthest(hf.gradients(model), expected)


def test_router_losses(ranks: Ranks) -> None:
    assert max(ranks.run(step_with_router_losses)) < EXACT


def noisy_router(rank: int) -> tuple[int, dict[str, float]]:
    """Each call of a router sees its tokens with fresh noise, which no checkpoint restores."""
    gradients, routes = [], []
    for checkpointed in (False, True):
        model = hf.build("Mixtral")
        sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="combine")
        if checkpointed:
            hf.checkpoint_layers(model, sharded.context_fn)
        noise = torch.Generator().manual_seed(rank)

        def disturb(_: nn.Module, args: tuple[torch.Tensor], noise: torch.Generator = noise) -> torch.Tensor:
            return args[0] + torch.randn(args[0].shape, dtype=args[0].dtype, generator=noise)

        for layer in model.model.layers:
            layer.mlp.gate.register_forward_pre_hook(disturb)
        hf.loss_of(model, hf.batch(rank)).backward()
        gradients.append(hf.gradients(model))
        with torch.no_grad():
            x = torch.zeros(50, hf.HIDDEN, dtype=torch.float64)
            routes.append(sum((model.model.layers[0].mlp.gate(x)[2][:, 0] != 0).tolist()))
    plain, kept = gradients
    # The weight's own gradient is that of the noisy tokens, which are not kept.
    others = [key for key in plain if not key.endswith("gate.weight")]
    return routes[0], {key: (kept[key] - plain[key]).abs().max().item() for key in others}


def test_recompute_routes_as_the_forward_did(ranks: Ranks) -> None:
    for elsewhere, errors in ranks.run(noisy_router):
        assert elsewhere > 10, "the noise changes no route"
        assert len(errors) > 15
        assert max(errors.values()) == 0.0


def step_with_idle_rank(rank: int) -> tuple[float, list[int]]:
    """Rank 1's experts receive nothing, and rank 1 has more tokens."""

    def tied() -> nn.Module:
        model = hf.build("Qwen3Moe")
        for layer in model.model.layers:
            nn.init.zeros_(layer.mlp.gate.weight)  # equal logits: the same experts win for every token
        return model

    expected = hf.one_process(tied())
    model = tied()
    sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="combine")
    hf.checkpoint_layers(model, sharded.context_fn)
    hf.loss_of(model, hf.batch(rank)).backward()
    hf.average_dense_gradients(model)
    actual = hf.gradients(model)
    idle = [key for key, gradient in expected.items() if not gradient.any()]
    assert all(not actual.pop(key).any() and not expected.pop(key).any() for key in idle)
    halves = [
        int(expected[f"model.layers.0.mlp.experts.{name}"][part].count_nonzero() > 0)
        for name in ("gate_up_proj", "down_proj")
        for part in (slice(0, 2), slice(2, 4))
    ]
    return hf.furthest(actual, expected), halves


def test_rank_whose_experts_get_no_token_trains(ranks: Ranks) -> None:
    for error, halves in ranks.run(step_with_idle_rank):
        assert error < EXACT
        assert halves in ([1, 0, 1, 0], [0, 1, 0, 1])


def frozen_experts(rank: int) -> float:
    def frozen() -> nn.Module:
        model = hf.build("Qwen3Moe")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        return model

    expected = hf.one_process(frozen())
    model = frozen()
    sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="moe_tail")
    hf.checkpoint_layers(model, sharded.context_fn)
    assert not any(parameter.requires_grad for parameter in sharded.expert_parameters())
    hf.loss_of(model, hf.batch(rank)).backward()
    hf.average_dense_gradients(model)
    return hf.furthest(hf.gradients(model), expected)


def test_frozen_experts(ranks: Ranks) -> None:
    assert max(ranks.run(frozen_experts)) < EXACT


def low_precision(rank: int, way: str) -> tuple[float, str]:
    """bfloat16 weights, or float32 weights under autocast: the loss is near that of one process, and trains."""
    dtype = torch.bfloat16 if way == "weights" else torch.float32
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast")
    model, reference = hf.build("Olmoe", dtype), hf.build("Olmoe", dtype)
    sharded = ac_moe.parallelize(model, hf.mesh(2), dispatcher_recompute_cache="moe_tail")
    hf.checkpoint_layers(model, sharded.context_fn)
    with autocast:
        wanted, loss = hf.loss_of(reference, hf.batch(rank)), hf.loss_of(model, hf.batch(rank))
    loss.backward()
    gradient = model.model.layers[0].mlp.experts.down_proj.grad
    assert gradient.to_local().isfinite().all()
    assert gradient.to_local().any()
    return (loss - wanted).abs().item() / wanted.item(), str(gradient.dtype)


@pytest.mark.parametrize("way", ["weights", "autocast"])
def test_low_precision(ranks: Ranks, way: str) -> None:
    for error, dtype in ranks.run(low_precision, way=way):
        assert error < 1e-2
        assert dtype == ("torch.bfloat16" if way == "weights" else "torch.float32")


def untouched(rank: int) -> None:
    model, original = hf.build("DeepseekV3"), hf.build("DeepseekV3")
    modules = [(name, type(module)) for name, module in model.named_modules()]
    ac_moe.parallelize(model, hf.mesh(2))
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    expected = original.state_dict()
    actual = model.state_dict()
    assert list(actual) == list(expected)
    for key, tensor in actual.items():
        assert tensor.shape == expected[key].shape, key
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, expected[key]), key
    sharded = [key for key, tensor in actual.items() if isinstance(tensor, DTensor)]
    assert len(sharded) == 2 * hf.LAYERS
    assert all(actual[key].placements == (Shard(0),) for key in sharded)
    local = actual[sharded[0]].to_local()
    assert local.untyped_storage().nbytes() * 2 == expected[sharded[0]].untyped_storage().nbytes()


def test_names_classes_and_values_stay(ranks: Ranks) -> None:
    ranks.run(untouched)


def copied(rank: int) -> None:
    model = hf.build("Mixtral")
    ac_moe.parallelize(model, hf.mesh(2))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loss = hf.loss_of(twin, hf.batch(rank))
    loss.backward()
    expected = hf.loss_of(hf.build("Mixtral"), hf.batch(rank))
    assert abs((loss - expected).item()) < EXACT
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())


def test_deep_copy_computes_with_its_own_weights(ranks: Ranks) -> None:
    ranks.run(copied)


def refusals(rank: int) -> dict[str, tuple[str, str]]:
    """What is said of each bad call; no call may have changed anything."""
    ep = hf.mesh(2)
    told = {}

    def refuse(name: str, model: nn.Module, mesh: object = ep, **options: object) -> None:
        before = [(key, id(parameter)) for key, parameter in model.named_parameters()]
        forwards = [vars(module).get("forward") for module in model.modules()]
        with pytest.raises((ValueError, TypeError)) as caught:
            ac_moe.parallelize(model, mesh, **options)
        assert [(key, id(parameter)) for key, parameter in model.named_parameters()] == before
        assert [vars(module).get("forward") for module in model.modules()] == forwards
        told[name] = (type(caught.value).__name__, str(caught.value))

    refuse("num_experts", hf.StandIn(experts=3))
    refuse("dimensions", hf.StandIn(), torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2)))
    refuse("no mesh", hf.StandIn(), dist.group.WORLD)
    refuse("no MoE", nn.Linear(2, 2))
    refuse("dispatcher", hf.StandIn(), dispatcher="allgather")
    refuse("option", hf.StandIn(), dispatcher_options={"pad_multiple": 4})
    refuse("reduction", hf.StandIn(), gradient_reduction="average")
    refuse("moe_tail", hf.build("GptOss"), dispatcher_recompute_cache="moe_tail", activation_checkpointing=False)
    refuse("wrapped", nn.parallel.DistributedDataParallel(hf.StandIn()))
    again = hf.StandIn()
    ac_moe.parallelize(again, ep)
    refuse("again", again)
    return told


def test_refused_before_anything_is_changed(ranks: Ranks) -> None:
    told, _ = ranks.run(refusals)
    expected = {
        "num_experts": r"ep_mesh: experts cannot be shared equally by 2 ranks.*layers\.0\.experts has 3",
        "dimensions": r"ep_mesh: has 2 dimensions.*one named 'ep'",
        "no mesh": r"ep_mesh: ProcessGroup\w* is not a DeviceMesh",
        "no MoE": r"model: Linear has no mixture-of-experts layer",
        "dispatcher": r"dispatcher: 'allgather' is not one of",
        "option": r"dispatcher_options: 'pad_multiple' is none of AllToAllDispatcher's",
        "reduction": r"gradient_reduction: 'average' is not one of 'mean', 'sum'",
        "moe_tail": r"(?s)model\.layers\.0\.mlp\.experts, model\.layers\.1\.mlp\.experts.*checkpointing is off.*"
        r"adds a bias.*applied after",
        "wrapped": r"model: it is wrapped in DistributedDataParallel; parallelize first",
        "again": r"model: layers\.0\.experts is parallelized already",
    }
    assert told.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.search(pattern, told[name][1]), f"{name}: {told[name]}"
    assert told["moe_tail"][0] == "MoETailError"
