"""The learning rate is a function of the step; norms and biases are not decayed."""

import pytest
from torch import nn

from ac_recipes.recipe import LRSchedulerConfig, OptimizerConfig
from ac_recipes.training.optimizer import build_optimizer, learning_rate, set_learning_rate


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1]),
    ],
)
def test_warm_up_then_decay_to_the_least_at_the_last_step(style, expected):
    config = LRSchedulerConfig(lr_decay_style=style, lr_warmup_steps=2, min_lr=0.1)
    assert [learning_rate(step, 7, 1.0, config) for step in range(7)] == pytest.approx(expected, abs=1e-6)


def test_a_run_of_one_step_has_the_peak_rate():
    assert learning_rate(0, 1, 1.0, LRSchedulerConfig()) == 1.0


def test_only_matrices_are_decayed_and_frozen_parameters_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(weight_decay=0.1))
    decayed, kept = optimizer.param_groups
    assert ([p.dim() for p in decayed["params"]], decayed["weight_decay"]) == ([2], 0.1)
    assert ([p.dim() for p in kept["params"]], kept["weight_decay"]) == ([1, 1, 1], 0.0)
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_an_automatic_warm_up_is_a_tenth_of_the_steps_and_at_most_a_thousand():
    config = LRSchedulerConfig(lr_decay_style="constant", lr_warmup_steps="auto")
    assert [learning_rate(step, 20, 1.0, config) for step in range(3)] == [0.5, 1.0, 1.0]
    assert learning_rate(499, 100_000, 1.0, config) == 0.5
    assert learning_rate(0, 5, 1.0, config) == 1.0
