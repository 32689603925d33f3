from collections import Counter, namedtuple

import torch

from ac_moe.routing.places import Place, kept_copy, scratch_copy

Pair = namedtuple("Pair", "one other")


def test_some_entries() -> None:
    holder = {"a": 1, "b": 2, "c": 3}
    place = Place(holder, ("a", "x"))
    assert place.read() == {"a": 1}
    assert place.exchange({"x": 9}) == {"a": 1}
    assert holder == {"b": 2, "c": 3, "x": 9}
    assert place.exchange({"a": 1}) == {"x": 9}
    assert holder == {"a": 1, "b": 2, "c": 3}


def test_all_entries() -> None:
    holder = {"a": 1, "b": 2}
    place = Place(holder)
    assert place.exchange({"c": 3}) == {"a": 1, "b": 2}
    holder["d"] = 4
    assert place.exchange({"a": 1, "b": 2}) == {"c": 3, "d": 4}
    assert holder == {"a": 1, "b": 2}


def test_copies_are_independent_and_alike() -> None:
    tensor = torch.ones(2)
    value = {"list": [tensor, 1, None], "tuple": (tensor, "x"), "pair": Pair(tensor, 2), "counter": Counter("aab")}
    copied = scratch_copy(kept_copy(value, {}), {})
    tensor.add_(1)
    value["list"].append(2)
    value["counter"]["b"] += 1
    one = copied["list"][0]
    assert one.tolist() == [1.0, 1.0]
    assert copied["list"][1:] == [1, None]
    assert copied["tuple"][0] is one is copied["pair"].one
    assert type(copied["pair"]) is Pair
    assert copied["counter"] == Counter("aab")
    assert type(copied["counter"]) is Counter


def test_copies_of_tensors_with_a_graph() -> None:
    graph = torch.ones(2, requires_grad=True) * 2
    kept = kept_copy(graph, {})
    assert kept.requires_grad
    assert kept.is_leaf
    scratch = scratch_copy(kept, {})
    scratch.add_(1)  # a leaf would refuse
    assert scratch.requires_grad
    assert kept.tolist() == [2.0, 2.0]
    assert not kept_copy(torch.ones(2), {}).requires_grad
