"""The promise inside Megatron-core: gradients, counters and logs bit for bit those without recompute."""

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ac_moe_megatron import DISPATCHERS, HIDDEN, RECOMPUTE, block, config, counting, megatron_on_cpu, run
from ac_moe_model import differences, stats_at_rest
from ac_moe_ranks import Ranks
from torch.nn.init import zeros_
from torch.utils.checkpoint import checkpoint

import ac_moe

SCHEDULES = {"sequential": "f0 b0 f1 b1", "interleaved": "f0 f1 b0 f2 b2 b1", "lifo": "f0 f1 b1 b0"}
MODES = {"flex": ("none", "combine", "moe_tail"), "alltoall": ("none", "combine"), "allgather": ("none", "combine")}
LAYERS = 2


def checkpointed_layers(recompute: str) -> int:
    return 1 if recompute == "block 1" else LAYERS


# ---- Megatron's own checkpointing


def own(rank: int, dispatcher: str, recompute: str, schedule: str) -> dict[str, tuple[Any, ...]]:
    with megatron_on_cpu():
        expected = run(block(config(dispatcher=dispatcher)), schedule)
        answers = {}
        for mode in MODES[dispatcher]:
            model = block(config(recompute, dispatcher))
            assert ac_moe.megatron.enable(model, mode) == ("layers.0.mlp", "layers.1.mlp")
            ac_moe.reset_stats()
            actual = run(model, schedule)
            stats = stats_at_rest()
            assert stats.live_entries == stats.live_pinned == 0
            answers[mode] = (differences(actual, expected), stats.stored, stats.served, stats.gemms_skipped)
        return answers


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [name for name in RECOMPUTE if name != "no recompute"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_own_checkpointing(ranks: Ranks, dispatcher: str, recompute: str, schedule: str) -> None:
    kept = checkpointed_layers(recompute) * SCHEDULES[schedule].count("f")
    expected = {"none": ([], 0, 0, 0), "combine": ([], kept, kept, 0), "moe_tail": ([], kept, kept, kept)}
    answers = ranks.run(own, dispatcher=dispatcher, recompute=recompute, schedule=SCHEDULES[schedule])
    assert answers == [{mode: expected[mode] for mode in MODES[dispatcher]}] * 2


def test_what_is_compared_is_there(ranks: Ranks) -> None:
    for result in ranks.run(plain_result):
        assert {name for name in result if not name.startswith("layers")} == {
            *("loss 0", "loss 1", "input 0", "input 1", "random", "logged 0")
        }
        assert all(value.float().abs().sum() > 0 for name, value in result.items() if "expert_bias" not in name)
        assert result["layers.1.mlp.router.local_tokens_per_expert"].sum() == 2 * 2 * 6  # top 2, 6 tokens, twice


def plain_result(rank: int) -> dict[str, torch.Tensor]:
    with megatron_on_cpu():
        return run(block(config()))


def in_bfloat16(rank: int, dispatcher: str) -> list[str]:
    def train(recompute: str, mode: str | None) -> dict[str, torch.Tensor]:
        model = block(config(recompute, dispatcher, bf16=True, params_dtype=torch.bfloat16))
        if mode:
            ac_moe.megatron.enable(model, mode)
        x = torch.randn(6, 1, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16().requires_grad_()
        torch.manual_seed(5)
        (model(x, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)).float() ** 2).sum().backward()
        return {"input": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}

    with megatron_on_cpu():
        return differences(train("uniform 2", MODES[dispatcher][-1]), train("no recompute", None))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_bfloat16_with_a_float32_router(ranks: Ranks, dispatcher: str) -> None:
    assert ranks.run(in_bfloat16, dispatcher=dispatcher) == [[], []]


# ---- what the recompute does not do


def work(rank: int, dispatcher: str, recompute: str, mode: str | None) -> dict[str, int]:
    """What one backward runs, recompute included."""
    with megatron_on_cpu():
        model = block(config(recompute, dispatcher))
        if mode:
            ac_moe.megatron.enable(model, mode)
        x = torch.randn(6, 1, HIDDEN).requires_grad_()
        loss = (model(x, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)) ** 2).sum()
        with counting() as counts:
            loss.backward()
        return dict(counts)


@pytest.mark.parametrize("recompute", ["uniform 1", "uniform 2", "moe"])
def test_hybridep_work_skipped(ranks: Ranks, recompute: str) -> None:
    none, combine, tail = (
        ranks.run(work, dispatcher="flex", recompute=recompute, mode=mode)[0] for mode in MODES["flex"]
    )
    # The backward of each dispatch is a combine, and the backward of each combine a dispatch.
    assert (none["combine"], combine["combine"]) == (2 * LAYERS, LAYERS)
    assert none["dispatch"] == combine["dispatch"] == tail["dispatch"] == 2 * LAYERS
    assert none["barrier"] - combine["barrier"] == LAYERS
    assert none["all_to_all"] - combine["all_to_all"] == LAYERS
    assert combine["mm"] == none["mm"]
    assert none["mm"] - tail["mm"] == LAYERS * 2  # one grouped GEMM of two local experts a layer
    assert {**tail, "mm": 0} == {**combine, "mm": 0}


@pytest.mark.parametrize(("dispatcher", "collective"), [("alltoall", "all_to_all"), ("allgather", "reduce_scatter")])
def test_collective_skipped(ranks: Ranks, dispatcher: str, collective: str) -> None:
    none, combine = (
        ranks.run(work, dispatcher=dispatcher, recompute="uniform 1", mode=mode)[0] for mode in ("none", "combine")
    )
    assert none.pop(collective) - combine.pop(collective) == LAYERS
    assert none == combine


# ---- checkpoints by hand


def by_hand(rank: int, dispatcher: str, form: str, early_stop: bool) -> dict[str, tuple[Any, ...]]:
    with megatron_on_cpu():

        class Stack(torch.nn.Module):
            """Each layer in a checkpoint of the caller's."""

            def __init__(self, layers: torch.nn.ModuleList, mode: str | None) -> None:
                super().__init__()
                self.layers, self.mode = layers, mode
                self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

            def one(self, number: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                x, _ = self.layers[number](hidden_states=x, attention_mask=mask)
                return x if form == "add" else x * self.scale

            def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
                for number in range(LAYERS):
                    if self.mode is None:
                        x = self.one(number, x, attention_mask)
                        continue
                    context_fn = ac_moe.context_fn(self.mode, pin_routing=True)
                    x = checkpoint(
                        *(self.one, number, x, attention_mask),
                        use_reentrant=False,
                        early_stop=early_stop,
                        context_fn=context_fn,
                    )
                return x

        expected = run(Stack(block(config(dispatcher=dispatcher)).layers, None))
        answers = {}
        for mode in MODES[dispatcher]:
            model = Stack(block(config(dispatcher=dispatcher)).layers, mode)
            ac_moe.megatron.enable(model, mode)
            ac_moe.reset_stats()
            actual = run(model)
            stats = stats_at_rest()
            assert stats.live_entries == stats.live_pinned == 0
            answers[mode] = (differences(actual, expected), stats.served)
        return answers


@pytest.mark.parametrize("early_stop", [True, False], ids=["early-stop", "to-the-end"])
@pytest.mark.parametrize("form", ["add", "mul"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_checkpoint_by_hand(ranks: Ranks, dispatcher: str, form: str, early_stop: bool) -> None:
    # Dropout, which saves its mask, comes after each combine: early stop does not end the recompute before it.
    answers = ranks.run(by_hand, dispatcher=dispatcher, form=form, early_stop=early_stop)
    assert answers == [{mode: ([], 0 if mode == "none" else 2 * LAYERS) for mode in MODES[dispatcher]}] * 2


# ---- enable and disable


def attributes(model: torch.nn.Module, *, of_call: bool = False) -> dict[str, int]:
    """Every attribute of every module, dispatcher and manager, by identity; or of the last two, those with tensors."""
    found = {}
    for path, module in model.named_modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        manager = getattr(dispatcher, "_comm_manager", None)
        owners = {"dispatcher": dispatcher, "manager": manager} | ({} if of_call else {"": module})
        for kind, owner in owners.items():
            for name, value in vars(owner).items() if owner is not None else ():
                if not of_call or (isinstance(value, torch.Tensor | tuple) and "tensor(" in repr(value)):
                    found[f"{path}.{kind}.{name}"] = id(value)
    return found


def restored(rank: int, dispatcher: str) -> None:
    with megatron_on_cpu():
        from megatron.core import tensor_parallel
        from megatron.core.transformer.moe import moe_layer, router, token_dispatcher

        modules = (tensor_parallel, moe_layer, router, token_dispatcher)
        globals_before = [dict(vars(module)) for module in modules]
        model = block(config("uniform 1", dispatcher))
        before, tensors, tree = attributes(model), attributes(model, of_call=True), repr(model)
        keys = list(model.state_dict())
        for mode in MODES[dispatcher]:  # enabling again changes the mode
            ac_moe.megatron.enable(model, mode)
            assert attributes(model) != before
        assert (repr(model), list(model.state_dict())) == (tree, keys)
        ac_moe.megatron.disable(model)
        assert attributes(model) == before
        ac_moe.megatron.disable(model)  # nothing to undo
        assert [dict(vars(module)) for module in modules] == globals_before

        ac_moe.megatron.enable(model, "combine")
        run(model)
        ac_moe.megatron.disable(model)
        assert not {name for name in attributes(model, of_call=True) if name not in tensors}
        ac_moe.reset_stats()
        expected = run(block(config("uniform 1", dispatcher)))
        fresh = block(config("uniform 1", dispatcher))
        ac_moe.megatron.enable(fresh, "combine")
        ac_moe.megatron.disable(fresh)
        assert differences(run(fresh), expected) == []
        assert ac_moe.stats().stored == 0


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_disable_restores_everything(ranks: Ranks, dispatcher: str) -> None:
    ranks.run(restored, dispatcher=dispatcher)


def replaced_since(rank: int) -> str:
    with megatron_on_cpu():
        model = block(config("uniform 1"))
        ac_moe.megatron.enable(model, "combine")
        layer = model.layers[1].mlp
        ours = layer.forward
        layer.forward = functools.partial(ours, padding_mask=None)
        with pytest.raises(RuntimeError, match="undo that first") as caught:
            ac_moe.megatron.disable(model)
        layer.forward = ours
        ac_moe.megatron.disable(model)
        return str(caught.value)


def test_something_else_took_the_place(ranks: Ranks) -> None:
    told, _ = ranks.run(replaced_since)
    assert told.startswith("MoELayer.forward was replaced after ac_moe.megatron.enable, by functools.partial(")


def keeps_previous(rank: int) -> None:
    with megatron_on_cpu():
        model = block(config("moe"))
        layer, calls = model.layers[0].mlp, []
        own = layer.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return own(*args, **kwargs)

        layer.forward = counted
        ac_moe.megatron.enable(model, "combine")
        run(model)
        assert len(calls) == 2
        ac_moe.megatron.disable(model)
        assert layer.forward is counted


def test_what_stood_there_before_is_kept(ranks: Ranks) -> None:
    ranks.run(keeps_previous)


# ---- copies


class _Pickler(pickle.Pickler):
    """Process groups are connections: they are named, not pickled. (No Megatron model can be pickled otherwise.)"""

    def persistent_id(self, thing: object) -> int | None:
        return groups().index(thing) if isinstance(thing, dist.ProcessGroup) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, number: int) -> object:
        return groups()[number]


def groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def pickled(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    _Pickler(file).dump(model)
    file.seek(0)
    return _Unpickler(file).load()


def train(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Two steps of an MoE layer, from gradients and counters of zero."""
    layer.zero_grad()
    for buffer in layer.buffers():
        buffer.zero_()
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(6, 1, HIDDEN, generator=generator).requires_grad_() for _ in range(2)]
    for x in inputs:
        (layer(x)[0] ** 2).sum().backward()
    result = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return result | {name: value.clone() for name, value in [*gradients_of(layer), *layer.named_buffers()]}


def gradients_of(layer: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.grad) for name, parameter in layer.named_parameters()]


def copies(rank: int, dispatcher: str, how: str) -> tuple[list[str], int]:
    with megatron_on_cpu():
        # Of a whole TransformerBlock Megatron's linear layers cannot be pickled.
        layer = block(config("moe", dispatcher, init_method=zeros_, output_layer_init_method=zeros_)).layers[0].mlp
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        ac_moe.megatron.enable(layer, "combine")
        expected = train(layer)
        other = pickled(layer) if how == "pickle" else copy.deepcopy(layer, {id(group): group for group in groups()})
        assert (other.forward.owner, other.router.forward.owner) == (other, other.router)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(float("nan"))  # the copy must not use the original
        ac_moe.reset_stats()
        actual = train(other)
        served = ac_moe.stats().served
        ac_moe.megatron.disable(other)
        return differences(actual, expected), served


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_copies_after_training(ranks: Ranks, dispatcher: str, how: str) -> None:
    assert ranks.run(copies, dispatcher=dispatcher, how=how) == [([], 2)] * 2


def copied_block(rank: int) -> list[str]:
    with megatron_on_cpu():
        model = block(config("uniform 2"))
        ac_moe.megatron.enable(model, "moe_tail")
        expected = run(model)
        model.zero_grad()
        for buffer in model.buffers():
            buffer.zero_()
        other = copy.deepcopy(model, {id(group): group for group in groups()})
        return differences(run(other), expected)


def test_copy_of_a_block(ranks: Ranks) -> None:
    assert ranks.run(copied_block) == [[], []]


# ---- many steps


def steps(rank: int, mode: str) -> list[tuple[int, int, int]]:
    with megatron_on_cpu():
        model = block(config("uniform 2", hidden_dropout=0.0))
        ac_moe.megatron.enable(model, mode)
        seen, losses = [], []
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)
        for _ in range(50):
            x = torch.randn(4, 1, HIDDEN).requires_grad_()
            losses.append((model(x, attention_mask=mask) ** 2).sum())  # held, graph and all
            losses[-1].backward()
            stats = ac_moe.stats()
            seen.append((stats.live_entries, stats.live_bytes, stats.live_pinned))
        return seen


@pytest.mark.parametrize("mode", ["none", "combine", "moe_tail"])
def test_nothing_is_left_after_any_of_50_steps(ranks: Ranks, mode: str) -> None:
    assert ranks.run(steps, mode=mode) == [[(0, 0, 0)] * 50] * 2


def memory(rank: int, recompute: str) -> list[int]:
    with megatron_on_cpu():
        model = block(config(recompute))
        ac_moe.megatron.enable(model, "combine")
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
        held, seen = [], []
        for _ in range(3):
            held.append(model(torch.randn(6, 1, HIDDEN).requires_grad_(), attention_mask=mask))
            seen.append(ac_moe.stats().live_bytes)
        held.clear()
        return [*seen, ac_moe.stats().live_bytes]


@pytest.mark.parametrize("recompute", ["uniform 1", "uniform 2", "block 1", "moe"])
def test_memory_is_one_activation_a_layer_and_microbatch(ranks: Ranks, recompute: str) -> None:
    each = checkpointed_layers(recompute) * 6 * HIDDEN * 4
    assert ranks.run(memory, recompute=recompute) == [[each, 2 * each, 3 * each, 0]] * 2
