"""The plan for a recipe's budget."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

import ac_core
from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError, BudgetError, Plan
from ac_recipes.analysis.policies import BUDGET_FIELD
from ac_recipes.analysis.subject import Device, Kernels, step_settings
from ac_recipes.analysis.words import words_for
from ac_recipes.errors import UsageError
from ac_recipes.planned import check_planned, planned_for
from ac_recipes.recipe import Recipe
from ac_recipes.training.ranks import Ranks


def make_plan(
    recipe: Recipe,
    config: ActivationCheckpointingConfig,
    *,
    device: Device = "cuda",
    kernels: Kernels = "plain",
    expert_load: float | None = None,
    named: str = BUDGET_FIELD,
) -> Plan:
    """The cheapest checkpointing within `config.memory_budget`, for a step of one rank of the recipe.

    named: where the budget was given, for messages.

    Raises:
        UsageError: nothing fits, and the least that would; the recipe has sizes that cannot be planned for, its model
            cannot be checkpointed, or the budget is that of a GPU, and none is here.
    """
    assert config.memory_budget is not None
    check_device(config, named)
    settings = step_settings(recipe, device=device, kernels=kernels, expert_load=expert_load)
    settings |= {"scope": config.scope, "layers": config.layers, "offload": config.offload}
    try:
        with _smallest_card(recipe) if config.memory_budget == "device" else nullcontext():
            return ac_core.plan(budget=config.memory_budget, **settings)
    except BudgetError as error:
        said = error.advice.text(words_for(recipe)).removeprefix("memory_budget: ")
        raise UsageError(f"{named}: {said}") from error
    except ActivationCheckpointingError as error:
        raise UsageError(str(error)) from error


def check_device(config: ActivationCheckpointingConfig, named: str = BUDGET_FIELD) -> None:
    """Refuse the budget `device`, of which a plan is still to be made, where there is no GPU to ask.

    Raises:
        UsageError: naming the budget and what to give in its place.
    """
    if config.memory_budget == "device" and config.plan is None and not torch.cuda.is_available():
        raise UsageError(f"{named}: 'device' is what the GPU has, and there is none here; give a size, such as '80GiB'")


def with_plan(
    recipe: Recipe,
    config: ActivationCheckpointingConfig,
    *,
    device: Device = "cuda",
    kernels: Kernels = "plain",
    expert_load: float | None = None,
    named: str = BUDGET_FIELD,
) -> ActivationCheckpointingConfig:
    """A config that can be applied as it is: with a plan, where it has a budget and none. Raises as `make_plan`."""
    if config.policy != "budget" or config.plan is not None:
        return config
    plan = make_plan(recipe, config, device=device, kernels=kernels, expert_load=expert_load, named=named)
    return replace(config, plan=plan.blocks, planned_for=planned_for(recipe, plan.budget))


def planned_recipe(recipe: Recipe, plan: Plan, ranks: int | None = None) -> Recipe:
    """The recipe with policy `budget`, the budget, the plan and what that was made for.

    ranks: it was made for; `None`: as many as the recipe says.
    """
    own, sized = recipe.distributed.checkpointing, recipe if ranks is None else _on_ranks(recipe, ranks)
    config = replace(
        own,
        policy="budget",
        memory_budget=plan.budget,
        save=None,
        plan=plan.blocks,
        planned_for=planned_for(sized, plan.budget),
    )
    try:
        return replace(recipe, distributed=replace(recipe.distributed, activation_checkpointing=config))
    except ValueError as error:  # what the recipe says beside it, such as compile, cannot honour the plan
        raise UsageError(str(error)) from error


@contextmanager
def _smallest_card(recipe: Recipe) -> Iterator[None]:
    """Makes the GPU with the least free memory the current one, of those that the ranks of `recipe` will have on this
    machine: `device` is what every rank has. Ranks that are there already agree among themselves, in ac-core."""
    cards = range(min(torch.cuda.device_count(), recipe.distributed.dp_size or 1))
    if len(cards) < 2 or torch.distributed.is_initialized():
        yield
        return
    with torch.cuda.device(min(cards, key=lambda card: torch.cuda.mem_get_info(card)[0])):
        yield


def recipe_to_train(recipe: Recipe, ranks: Ranks) -> Recipe:
    """A recipe that `ranks` can train: where it has a budget and no plan, with the plan for them.

    Every rank makes it, for the least memory that any of them has, and all take that of rank 0: machines that are not
    alike might plan differently, and ranks that checkpoint differently wait for one another in vain.

    Raises:
        UsageError: as `make_plan`; the recipe has a plan, and it is for a smaller step or more ranks.
    """
    config = recipe.distributed.checkpointing
    if config.policy != "budget":
        return recipe
    if config.plan is not None:
        try:
            check_planned(recipe, ranks.world_size // recipe.distributed.tp_size)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return recipe
    plan = make_plan(_on_ranks(recipe, ranks.world_size), config, device=ranks.device.type)
    return planned_recipe(recipe, ranks.from_first(plan), ranks.world_size)


def _on_ranks(recipe: Recipe, ranks: int) -> Recipe:
    return replace(recipe, distributed=replace(recipe.distributed, dp_size=ranks))
