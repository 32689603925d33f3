"""The policies that a recipe is looked at under: the fixed ones, and the recipe's own. Loads without torch."""

from dataclasses import replace

from ac_core import ActivationCheckpointingConfig
from ac_core.planning.budget import parse_budget
from ac_recipes.errors import UsageError
from ac_recipes.recipe import Recipe

BUDGET_FLAG = "--budget"
BUDGET_FIELD = "distributed.activation_checkpointing.memory_budget"
"""Where a budget comes from, as messages name it."""


def policies(recipe: Recipe, budget: str | int | float | None = None) -> dict[str, ActivationCheckpointingConfig]:
    """By name: `none`, `full`, `selective`, and `budget` where the recipe or the caller gives one.

    All have the scope, the layers and the switches of the recipe; the one that the recipe names is the recipe's own.
    """
    own = recipe.distributed.checkpointing
    plain = replace(own, policy="none", save=None, memory_budget=None, plan=None)
    names = ("none", "full") if recipe.distributed.strategy == "megatron_fsdp" else ("none", "full", "selective")
    found = {name: replace(plain, policy=name) for name in names} | {str(own.policy): own}
    if budget is not None:
        found["budget"] = budget_policy(own, budget)
    return found


def budget_policy(own: ActivationCheckpointingConfig, budget: str | int | float) -> ActivationCheckpointingConfig:
    """The recipe's settings with another budget, and no plan yet."""
    return replace(own, policy="budget", memory_budget=budget, save=None, plan=None)


def asked_policy(recipe: Recipe) -> ActivationCheckpointingConfig:
    """The recipe's own policy, to be looked at as it is.

    Raises:
        UsageError: it is none.
    """
    own = recipe.distributed.checkpointing
    if own.policy == "none":
        raise UsageError(
            "distributed.activation_checkpointing: it is off in this recipe, so there is nothing to look at; give a "
            "policy, such as --distributed.activation_checkpointing full"
        )
    return own


def parse_budget_argument(text: str) -> str | int | float:
    """`--budget` as written: a number of bytes, a fraction, or text such as `24GiB`, `50%` and `device`.

    Raises:
        UsageError: it is no budget.
    """
    budget = _number_or_text(text)
    try:
        parse_budget(budget)
    except ValueError as error:
        raise UsageError(f"{BUDGET_FLAG}: {error}") from error
    return budget


def _number_or_text(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
