"""What counts as state, and what is left alone."""

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ac_core.region.attributes import KeptAttributes
from ac_core.region.found import Found
from ac_core.region.layout import Layout, modules_of


class Colour(Enum):
    RED = 1


class Own:
    def __init__(self):
        self.calls = 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)


def layout_of(block):
    return Layout(modules_of(block))


def recomputed(block, change, seen):
    """What `seen(block)` is in a recompute, where the forward makes `change(block)`; and what is left of it."""
    kept, layout = KeptAttributes("block"), layout_of(block)
    noted = kept.note(layout)
    change(block)
    kept.settle(noted, False)
    taken = kept.restore(noted)
    there = seen(block)
    change(block)
    kept.release(noted, taken)
    return there, seen(block)


@pytest.mark.parametrize(
    ("value", "change", "seen"),
    [
        ([1, [2]], lambda v: v[1].append(3), lambda v: list(v[1])),
        ({"a": {"b": 1}}, lambda v: v["a"].update(b=v["a"]["b"] + 1), lambda v: dict(v["a"])),
        ({"a": (1, [2])}, lambda v: v["a"][1].append(3), lambda v: list(v["a"][1])),
        (SimpleNamespace(n=1), lambda v: setattr(v, "n", v.n + 1), lambda v: v.n),
        (Own(), lambda v: setattr(v, "calls", v.calls + 1), lambda v: v.calls),
        ([Own()], lambda v: setattr(v[0], "calls", v[0].calls + 1), lambda v: v[0].calls),
    ],
    ids=["list", "dict", "tuple", "namespace", "own object", "own object in a list"],
)
def test_contents_at_any_depth(value, change, seen):
    block = Block()
    block.value = value
    before = seen(value)
    there, after = recomputed(block, lambda b: change(b.value), lambda b: seen(b.value))
    assert there == before
    assert after != before
    assert block.value is value


def test_a_container_that_is_replaced_comes_back_with_what_was_in_it():
    block = Block()
    block.value = block.again = [1]

    def change(b):
        b.value.append(2)
        b.value = []

    there, after = recomputed(block, change, lambda b: (list(b.value), list(b.again), b.value is b.again))
    assert there == ([1], [1], True)
    assert after == ([], [1, 2], False)


def test_one_that_holds_itself():
    block = Block()
    block.value = [1]
    block.value.append(block.value)
    there, after = recomputed(block, lambda b: b.value.append(2), lambda b: (len(b.value), b.value[1] is b.value))
    assert (there, after) == ((2, True), (3, True))


@pytest.mark.parametrize("value", [nn.ReLU(), Colour.RED, object(), torch.autograd.profiler.profile(enabled=False)])
def test_what_is_not_state_is_not_looked_into(value):
    block = Block()
    block.__dict__["value"] = value
    found = Found(layout_of(block), "block")
    assert found.lasting
    assert found.still()
    assert found._containers == []


def test_a_foreign_object_keeps_its_state():
    """Half of what a library's object stands for may lie elsewhere."""
    block = Block()
    block.value = torch.autograd.profiler.profile(enabled=False)
    block.value.calls = 0

    def change(b):
        b.value.calls += 1

    assert recomputed(block, change, lambda b: b.value.calls) == (1, 2)


@pytest.mark.parametrize("sharded", [False, True])
def test_transformer_engines_modules_keep_their_own_records(sharded):
    Engine = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    block = Block()
    block.inner = type("Sharded", (Engine,), {})(2, 2) if sharded else Engine(2, 2)
    block.inner.fp8_meta = {}

    def change(b):
        b.inner.fp8_meta["position"] = 1
        b.inner.eval()

    assert recomputed(block, change, lambda b: (dict(b.inner.fp8_meta), b.inner.training)) == (
        ({"position": 1}, True),
        ({"position": 1}, False),
    )


def test_a_block_without_changes_is_looked_at_once():
    block = Block()
    block.sizes, block.kind = [1, 2], "a"
    kept, layout = KeptAttributes("block"), layout_of(block)
    first = kept.note(layout)
    kept.settle(first, False)
    assert kept.note(layout).found is first.found
    block.sizes.append(3)
    assert kept.note(layout).found is not first.found


@pytest.mark.parametrize("name", ["forward", "_forward_hooks", "__composable_api_state_key"])
def test_machinery_is_not_touched(name):
    block = Block()
    block.__dict__[name] = before = {"a": 1}

    def change(b):
        b.__dict__[name] = {"b": 2}

    there, after = recomputed(block, change, lambda b: b.__dict__[name])
    assert there == after == {"b": 2}
    assert before == {"a": 1}


def test_a_large_container_is_remembered_too():
    block = Block()
    block.value = list(range(10_000))
    there, after = recomputed(block, lambda b: b.value.append(0), lambda b: len(b.value))
    assert (there, after) == (10_000, 10_001)


def test_the_order_of_buffers_stays():
    block = Block()
    block.register_buffer("a", torch.ones(2))
    block.register_buffer("c", torch.ones(2))

    def change(b):
        if "b" not in b._buffers:
            del b.a
            b.register_buffer("b", torch.ones(2))
            b.register_buffer("a", torch.ones(2))

    there, after = recomputed(block, change, lambda b: list(b._buffers))
    assert there == ["a", "c"]
    assert after == ["c", "b", "a"]
