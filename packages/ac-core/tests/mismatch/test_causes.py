"""Each rule over the evidence it is made for; those with a model of their own are in test_mismatch.py."""

import torch
from torch import nn

from ac_core.mismatch.causes import Evidence, probable_cause
from ac_core.mismatch.evidence import Change, Extent
from ac_core.mismatch.recording import Choice, Meta, Saved

CPU = torch.device("cpu")


def meta(*shape, dtype=torch.float32):
    return Meta(torch.Size(shape), dtype, CPU)


def saved(node, autocast=None):
    return Saved(meta(2), "call", "", "", autocast, None, node)


def kind(block=None, **evidence):
    return probable_cause(Evidence(block or nn.Linear(2, 2), **evidence))[0].kind


def test_without_evidence_it_is_unknown_and_says_how_to_find_out():
    cause, others = probable_cause(Evidence(nn.Linear(2, 2), forward=meta(2), recompute=meta(3)))
    assert (cause.kind, others) == ("unknown", [])
    assert "ac_core.check_recompute()" in cause.remedy


def test_a_parameter_that_was_resharded():
    block = nn.Sequential(nn.Linear(2, 2))
    block[0].weight.untyped_storage().resize_(0)
    cause, _ = probable_cause(Evidence(block))
    assert cause.kind == "sharded parameter"
    assert "'0.weight' has no data" in cause.seen


def test_an_fsdp_unit_inside_the_block_that_casts():
    class FSDPLinear(nn.Linear):
        """As `fully_shard` names the class that it gives to a module."""

    block = nn.Sequential(FSDPLinear(2, 2))
    differ = {"forward": meta(2, dtype=torch.bfloat16), "recompute": meta(2)}
    assert kind(block, **differ) == "fsdp cast"
    assert kind(nn.Sequential(nn.Linear(2, 2)), **differ) == "dtype"
    assert kind(block, forward=meta(2), recompute=meta(3)) == "unknown"


def test_another_implementation_of_attention_is_seen_by_its_node():
    flash, math = "ScaledDotProductFlashAttentionForCpuBackward0", "BmmBackward0"
    assert kind(forward_node=flash, saved=saved(math)) == "sdpa"
    assert kind(forward_node=math, saved=saved(flash)) == "sdpa"
    assert kind(forward_node=flash, saved=saved(flash)) == "unknown"
    assert kind(forward_node=math, saved=saved("MmBackward0")) == "unknown"


def test_a_tensor_that_grows_run_by_run():
    grows = {"forward": meta(6, 4), "recompute": meta(8, 4), "repeated": meta(10, 4)}
    assert kind(**grows) == "cache"
    assert kind(**{**grows, "repeated": meta(8, 4)}) == "unknown"
    assert kind(**{**grows, "repeated": meta(6, 4)}) == "unknown"


def test_what_a_run_makes_longer_is_a_cache_and_what_it_writes_is_state():
    longer = Change("keys", Extent((2, 4)), Extent((3, 4)))
    written = Change("keys", Extent((2, 4), 1), Extent((2, 4), 2))
    assert kind(moved=[longer]) == "cache"
    assert kind(moved=[written]) == "state"


def test_state_that_moves_explains_runs_that_differ():
    assert kind(repeatable=False) == "random"
    assert kind(repeatable=False, moved=[Change("table", Extent((2,), 1), Extent((2,), 2))]) == "state"


def test_what_changed_comes_before_what_can_merely_differ():
    topk = Choice("aten::topk", "model.py:3 in forward", 0)
    cause, others = probable_cause(
        Evidence(nn.Linear(2, 2), forward=meta(2), recompute=meta(3), changed=[Change("k", 2, 3)], choices=[topk])
    )
    assert (cause.kind, [other.kind for other in others]) == ("attribute", ["routing"])
    assert "aten::topk at model.py:3 in forward" in others[0].seen


def test_autocast_inside_the_block_in_either_direction():
    differ = {"forward": meta(2, dtype=torch.bfloat16), "recompute": meta(2)}
    assert kind(**differ, saved=saved("MmBackward0"), autocast_at_entry=True) == "autocast"
    assert kind(**differ, saved=saved("MmBackward0", torch.bfloat16), autocast_at_entry=False) == "autocast"
    assert kind(**differ, saved=saved("MmBackward0"), autocast_at_entry=False) == "dtype"
