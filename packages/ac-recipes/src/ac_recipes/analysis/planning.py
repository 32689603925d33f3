"""The plan for a recipe's budget."""

from dataclasses import replace

import ac_core
from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError, Plan
from ac_recipes.analysis.subject import Device, Kernels, step_settings
from ac_recipes.errors import RunError, UsageError
from ac_recipes.recipe import Recipe


def make_plan(
    recipe: Recipe, config: ActivationCheckpointingConfig, *, device: Device = "cuda", kernels: Kernels = "plain"
) -> Plan:
    """The cheapest checkpointing within `config.memory_budget`, for a step of one rank of the recipe.

    Raises:
        UsageError: the recipe has sizes that cannot be planned for.
        RunError: nothing fits, and the least that would; or the model cannot be checkpointed.
    """
    assert config.memory_budget is not None
    settings = step_settings(recipe, device=device, kernels=kernels)
    try:
        return ac_core.plan(budget=config.memory_budget, scope=config.scope, layers=config.layers, **settings)
    except ActivationCheckpointingError as error:
        raise RunError(str(error)) from error


def with_plan(
    recipe: Recipe, config: ActivationCheckpointingConfig, *, device: Device = "cuda", kernels: Kernels = "plain"
) -> ActivationCheckpointingConfig:
    """A config that can be applied as it is: with a plan, where it has a budget and none. Raises as `make_plan`."""
    if config.policy != "budget" or config.plan is not None:
        return config
    return replace(config, plan=make_plan(recipe, config, device=device, kernels=kernels).blocks)


def planned_recipe(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with policy `budget`, the budget and the plan."""
    own = recipe.distributed.checkpointing
    config = replace(own, policy="budget", memory_budget=plan.budget, save=None, plan=plan.blocks)
    try:
        return replace(recipe, distributed=replace(recipe.distributed, activation_checkpointing=config))
    except ValueError as error:  # what the recipe says beside it, such as compile, cannot honour the plan
        raise UsageError(str(error)) from error


def recipe_to_train(recipe: Recipe, world_size: int, device: Device) -> Recipe:
    """A recipe that `world_size` ranks can train: where it has a budget and no plan, with the plan for them. Raises as
    `make_plan`."""
    config = recipe.distributed.checkpointing
    if config.policy != "budget" or config.plan is not None:
        return recipe
    sized = replace(recipe, distributed=replace(recipe.distributed, dp_size=world_size))
    return planned_recipe(recipe, make_plan(sized, config, device=device))
