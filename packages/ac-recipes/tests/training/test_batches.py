"""Sharing a global batch, and the order of sequences."""

from dataclasses import replace

import pytest
import torch

from ac_recipes.analysis.subject import real_subject
from ac_recipes.errors import UsageError
from ac_recipes.recipe import StepSchedulerConfig
from ac_recipes.training.batches import BatchPlan, GlobalOrder, limited
from ac_recipes.training.trainer import train


@pytest.mark.parametrize(
    ("total", "local", "ranks", "expected"),
    [(8, 4, 1, (4, 2)), (8, 4, 2, (4, 1)), (8, 4, 8, (1, 1)), (8, 8, 2, (4, 1)), (12, 2, 3, (2, 2))],
)
def test_a_plan_covers_the_global_batch(total, local, ranks, expected):
    plan = BatchPlan.of(StepSchedulerConfig(global_batch_size=total, local_batch_size=local), ranks)
    assert (plan.local, plan.accumulation) == expected
    assert plan.local * plan.accumulation * ranks == total


def test_what_cannot_be_shared_evenly_is_refused():
    with pytest.raises(UsageError, match="8 sequences cannot be shared evenly by 3 ranks"):
        BatchPlan.of(StepSchedulerConfig(global_batch_size=8), 3)
    with pytest.raises(UsageError, match="local_batch_size: 4 does not divide the 6 sequences of each of 2 ranks"):
        BatchPlan.of(StepSchedulerConfig(global_batch_size=12, local_batch_size=4), 2)


def test_every_epoch_sees_every_sequence_once_in_another_order():
    order = GlobalOrder(sequences=10, global_batch_size=4, seed=1)
    seen = torch.cat([order.batch(step) for step in range(5)])
    assert sorted(seen[:10].tolist()) == sorted(seen[10:].tolist()) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()


def test_the_order_needs_no_history():
    order = GlobalOrder(10, 4, seed=1)
    expected = [order.batch(step).tolist() for step in range(6)]
    assert [GlobalOrder(10, 4, seed=1).batch(step).tolist() for step in reversed(range(6))] == expected[::-1]
    assert GlobalOrder(10, 4, seed=2).batch(0).tolist() != expected[0]


@pytest.mark.parametrize(("epochs", "most", "steps"), [(None, 7, 7), (1, 7, 2), (2, 7, 5), (9, 7, 7), (1, 1, 1)])
def test_epochs_are_whole_batches_out_of_so_many_passes(epochs, most, steps):
    schedule = StepSchedulerConfig(global_batch_size=4, local_batch_size=4, max_steps=most, num_epochs=epochs)
    assert limited(schedule, sequences=10).max_steps == steps
    assert limited(replace(schedule, num_epochs=1), sequences=3).max_steps == 1


def test_a_global_batch_that_the_data_cannot_fill_is_refused_at_once(tiny):
    sizes = ("step_scheduler.global_batch_size=1000000000000", "step_scheduler.local_batch_size=1")
    for look in (real_subject, lambda recipe: train(recipe, "tiny")):
        with pytest.raises(UsageError, match=r"global_batch_size: 1000000000000 sequences are more than the \d+ that"):
            look(tiny(*sizes))
