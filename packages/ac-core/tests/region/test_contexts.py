"""Context functions compose, are re-enterable, and see every forward and every recompute."""

import pytest
import torch

from ac_core import apply_activation_checkpointing


class Recording:
    def __init__(self, log, name, fail=False):
        self.log, self.name, self.fail = log, name, fail

    def __enter__(self):
        if self.fail:
            raise ValueError("cannot enter")
        self.log.append(f"+{self.name}")

    def __exit__(self, *_):
        self.log.append(f"-{self.name}")


def recording_context_fn(log, name, **options):
    return lambda: (Recording(log, f"{name}.forward", **options), Recording(log, f"{name}.recompute"))


def test_the_first_is_the_outermost_in_both_phases(stack):
    log = []
    model = stack(depth=2)
    apply_activation_checkpointing(
        model, blocks="layers.0", context_fn=[recording_context_fn(log, "a"), recording_context_fn(log, "b")]
    )
    loss = model(torch.arange(6)).sum()
    assert log == ["+a.forward", "+b.forward", "-b.forward", "-a.forward"]
    log.clear()
    loss.backward()
    assert log == ["+a.recompute", "+b.recompute", "-b.recompute", "-a.recompute"]


def test_contexts_are_entered_again_by_a_second_backward(stack):
    log = []
    model = stack(depth=2)
    apply_activation_checkpointing(model, blocks="layers.1", context_fn=[recording_context_fn(log, "a")])
    loss = model(torch.arange(6)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert log.count("+a.recompute") == log.count("-a.recompute") == 2


def test_a_context_that_cannot_be_entered_leaves_the_others(stack):
    log = []
    model = stack(depth=2)
    apply_activation_checkpointing(
        model, context_fn=[recording_context_fn(log, "a"), recording_context_fn(log, "b", fail=True)]
    )
    with pytest.raises(ValueError, match="cannot enter"):
        model(torch.arange(6))
    assert log == ["+a.forward", "-a.forward"]


def test_one_context_fn_needs_no_list(stack, assert_same_step):
    log = []
    model = stack(depth=2)
    apply_activation_checkpointing(model, context_fn=recording_context_fn(log, "a"))
    assert_same_step(model, stack(depth=2))
    assert log.count("+a.recompute") == 2
