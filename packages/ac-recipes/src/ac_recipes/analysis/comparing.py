"""A recipe's step under none, full and selective checkpointing, and its budget: memory, time, recompute, loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

import ac_core
from ac_core import ActivationCheckpointingConfig
from ac_recipes.analysis.applying import applied
from ac_recipes.analysis.memory import Timeline
from ac_recipes.analysis.noise import within_noise
from ac_recipes.analysis.planning import check_device, with_plan
from ac_recipes.analysis.policies import BUDGET_FIELD, BUDGET_FLAG, policies
from ac_recipes.analysis.steps import RepeatableStep
from ac_recipes.analysis.subject import Subject, real_subject, refused_as_usage
from ac_recipes.errors import UsageError
from ac_recipes.parallel.config import CompileConfig, check_compile, compile_config
from ac_recipes.recipe import Recipe


@dataclass(frozen=True)
class Measured:
    """A step under one policy.

    peak_bytes: the most alive at once, with model, gradients, optimizer state and batch. saved_bytes: kept from forward
    to backward. recompute_flops: run again; forward_flops: of the forward alone. loss: of the batch. timeline: of the
    memory, under the profiler. seconds: of a step, round by round.
    """

    peak_bytes: int
    saved_bytes: int
    recompute_flops: int
    forward_flops: int
    loss: float
    timeline: Timeline
    seconds: tuple[float, ...] = ()

    @property
    def step_seconds(self) -> float:
        """The median of the rounds."""
        return median(self.seconds)


@dataclass(frozen=True)
class ComparedRecipe:
    """By policy, `none` first. failed: the policies whose step does not fit this device. compiled: whether the blocks
    were, under every policy."""

    subject: Subject
    measured: dict[str, Measured]
    failed: tuple[str, ...] = ()
    compiled: bool = False

    def loss_difference(self, name: str) -> float | None:
        """Of a policy against none."""
        none = self.measured.get("none")
        return None if none is None else self.measured[name].loss - none.loss

    def is_within_noise(self, name: str) -> bool | None:
        """Whether a policy's time is that of none, as far as can be told; see `noise.RULE`."""
        none = self.measured.get("none")
        return None if none is None else within_noise(self.measured[name].seconds, none.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        names = ("peak_bytes", "saved_bytes", "step_seconds", "recompute_flops", "loss")
        return {
            "policies": {name: {key: getattr(m, key) for key in names} for name, m in self.measured.items()},
            "within_noise": {name: self.is_within_noise(name) for name in self.measured if name != "none"},
            "out_of_memory": list(self.failed),
        }


def compare_policies(
    recipe: Recipe,
    *,
    budget: str | int | float | None = None,
    rounds: int = 7,
    compiled: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> ComparedRecipe:
    """Measure the recipe's step under each policy, on one process and the first local batch.

    One model serves all: a policy is applied, and taken off again after its turn. Each round gives every policy one
    turn, in an order that is reversed from round to round; a turn is a step that settles and a step that is timed.

    Args:
        budget: adds the policy `budget`; a recipe with a budget or a plan has it anyway.
        rounds: that are timed.
        compiled: compile the blocks, under every policy, as they are where the recipe says `compile`. Saved bytes and
            FLOPs are then those without it, since what compiled code does cannot be counted op by op.
        say: is told of what begins.

    Raises:
        UsageError: the recipe does not fit one process, its checkpointing cannot be applied, or no plan is within the
            budget.
    """
    wanted, named = policies(recipe, budget), BUDGET_FIELD if budget is None else BUDGET_FLAG
    for config in wanted.values():
        check_device(config, named)
    compiling = compile_config(recipe.compile) or (CompileConfig() if compiled else None)
    say("model and data")
    subject = real_subject(recipe)
    configs = {name: with_plan(recipe, c, device=subject.device.type, named=named) for name, c in wanted.items()}
    if compiling is not None:
        for name, config in configs.items():
            try:
                check_compile(replace(recipe.distributed, activation_checkpointing=config))
            except ValueError as error:
                raise UsageError(f"policy {name!r}: {error}") from error
    step = RepeatableStep(subject)
    measured: dict[str, Measured] = {}
    for name, config in configs.items():
        say(f"memory and FLOPs, {name}")
        try:
            measured[name] = _counted(step, config, compiling=compiling)
        except torch.OutOfMemoryError:
            step.drop_gradients()
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for number in range(rounds):
        say(f"time, round {number + 1} of {rounds}")
        names = list(measured)
        for name in names if number % 2 == 0 else reversed(names):
            with applied(subject.model, configs[name], compiling=compiling):
                step()
                seconds[name].append(step.timed())
    timed = {name: replace(m, seconds=tuple(seconds[name])) for name, m in measured.items()}
    failed = tuple(name for name in configs if name not in measured)
    return ComparedRecipe(subject, timed, failed, compiling is not None)


def _counted(step: RepeatableStep, config: ActivationCheckpointingConfig, compiling: CompileConfig | None) -> Measured:
    subject = step.subject
    with refused_as_usage():
        with applied(subject.model, config):
            usage = ac_core.measure(subject.model, subject.batch)
        with applied(subject.model, config, compiling=compiling):
            loss = step()
            timeline, peak = step.recorded()
    return Measured(
        peak_bytes=peak,
        saved_bytes=usage.saved_bytes,
        recompute_flops=usage.recompute_flops,
        forward_flops=usage.forward_flops,
        loss=loss,
        timeline=timeline,
    )
