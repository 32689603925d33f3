"""What a recipe will need under each policy, without weights and without a GPU."""

from collections.abc import Callable

import ac_core
from ac_core import Estimate
from ac_recipes.analysis.planning import check_device, with_plan
from ac_recipes.analysis.policies import BUDGET_FIELD, BUDGET_FLAG, policies
from ac_recipes.analysis.subject import Device, Kernels, refused_as_usage, step_settings, vocabulary
from ac_recipes.recipe import Recipe


def estimate_policies(
    recipe: Recipe,
    *,
    budget: str | int | float | None = None,
    device: Device = "cuda",
    kernels: Kernels = "plain",
    expert_load: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Estimate]:
    """One estimate a policy, by name: of a step of one rank.

    Args:
        budget: adds the policy `budget`, with the plan for it.
        device: whose kernels and optimizer are assumed. kernels, expert_load: as for
            `ac_core.estimate`.
        say: is told of each policy before it is estimated.

    Raises:
        UsageError: the recipe cannot be estimated, its checkpointing not be applied, or no plan is within the budget.
    """
    wanted, named = policies(recipe, budget), BUDGET_FIELD if budget is None else BUDGET_FLAG
    for config in wanted.values():
        check_device(config, named)
    assumed = {"device": device, "kernels": kernels, "expert_load": expert_load}
    settings = step_settings(recipe, **assumed)
    found = {}
    for name, config in wanted.items():
        say(name)
        with refused_as_usage():
            planned = with_plan(recipe, config, named=named, **assumed)
            found[name] = ac_core.estimate(policy=planned, **settings)
    return found


def stated_assumptions(recipe: Recipe, estimates: dict[str, Estimate]) -> list[str]:
    """What was taken for granted in all of them."""
    said = list(next(iter(estimates.values())).assumptions)
    config = recipe.model.config
    if config is not None and "vocab_size" not in (config.get("text_config") or config):
        said.append(f"the vocabulary has the {vocabulary(recipe)} entries that the tokenizer is asked for or has")
    if recipe.distributed.dp_size is None:
        ranks = recipe.distributed.ep_size
        said.append(f"{'one rank' if ranks == 1 else f'{ranks} ranks'}; for more, give --distributed.dp_size")
    backend = recipe.model.backend
    if recipe.distributed.ep_size > 1 and backend is not None and backend.dispatcher == "hybridep":
        said.append("rows travel as in the reference of HybridEP; the buffers that DeepEP keeps on a GPU do not count")
    return said
