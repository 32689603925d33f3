"""Plans for the recipes that ship, halfway between all and nothing, and what their steps take when they are applied."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import ac_core
from ac_core import Plan
from ac_recipes.analysis.planning import make_plan, planned_recipe
from ac_recipes.analysis.policies import budget_policy, policies
from ac_recipes.analysis.subject import step_settings
from ac_recipes.errors import UsageError
from ac_recipes.load import load_recipe
from ac_recipes.reader import split_overrides
from ac_recipes.recipe import Recipe
from tools.estimate.recipe_step import Route, busiest_load, real_step


@dataclass(frozen=True)
class Shipped:
    """A recipe, and what is changed so that a CPU can run it. ranks: processes. random, route: see `real_step`."""

    name: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    random: bool = False
    route: Route = "evenly"

    def load(self) -> Recipe:
        return load_recipe(self.name, split_overrides(list(self.overrides))[1])


_SMALL_SMOLLM2 = (  # its widths, 4 of its 30 layers
    "--model.pretrained_model_name_or_path=null",
    "--model.config.num_hidden_layers=4",
    "--step_scheduler.local_batch_size=8",  # of 2, with which nothing in the blocks matters beside the embeddings
    "--step_scheduler.global_batch_size=16",
)
_SMALL_LLAMA = (  # its widths, 3 of its 16 layers, 4096 of its 128256 tokens
    "--model.config.num_hidden_layers=3",
    "--model.config.vocab_size=4096",
    "--dataset.sequence_length=256",
    "--step_scheduler.local_batch_size=2",
    "--step_scheduler.global_batch_size=4",
)

RECIPES = [
    Shipped("default"),
    Shipped("vlm-digits"),
    Shipped("qwen3-moe", ("--distributed.ep_size=1", "--model.backend=null")),
    Shipped("qwen3-moe", ranks=2),
    Shipped("qwen3-moe", ranks=2, route="weights"),
    Shipped("smollm2-sft", _SMALL_SMOLLM2, random=True),
    Shipped("smollm2-lora", _SMALL_SMOLLM2, random=True),
    Shipped("llama-3.2-1b-squad", _SMALL_LLAMA, random=True),
]


@dataclass(frozen=True)
class Applied:
    """A plan, the predicted peak of `full`, and the peaks of the step under the plan, by rank; in bytes. load: of the
    busiest rank, where ranks share experts."""

    shipped: Shipped
    load: float | None
    plan: Plan
    full: int
    real: list[int]

    @property
    def error(self) -> float:
        """Against the rank that takes most."""
        return self.plan.peak_bytes / max(self.real) - 1


def apply_plan(shipped: Shipped) -> Applied:
    """Plan at a budget in the middle between the peaks of `none` and `full`, apply, measure.

    Where weights route tokens to experts of several ranks, the plan is for the load that a step shows.

    Raises:
        UsageError: a package that the recipe names is not here.
    """
    recipe = shipped.load()
    load = None
    if recipe.distributed.ep_size > 1:
        load = 1.0 if shipped.route == "evenly" else busiest_load(real_step(recipe, shipped.ranks))
    settings = step_settings(recipe, device="cpu", kernels="plain", expert_load=load)
    fixed = {name: config for name, config in policies(recipe).items() if name in ("none", "full")}
    found = {name: ac_core.estimate(policy=config, **settings).peak_bytes for name, config in fixed.items()}
    budget = budget_policy(recipe.distributed.checkpointing, (found["none"] + found["full"]) // 2)
    plan = make_plan(recipe, budget, device="cpu", expert_load=load)
    planned = planned_recipe(recipe, plan)
    if shipped.random:
        planned = replace(planned, model=replace(planned.model, pretrained_model_name_or_path=None))
    measured = real_step(planned, shipped.ranks, random=shipped.random, route=shipped.route)
    return Applied(shipped, load, plan, found["full"], [rank.peak for rank in measured])


def table(recipes: Iterable[Shipped], say: Callable[[str], None]) -> str:
    """Markdown. `say` is told of progress, and of recipes that cannot be run here."""
    lines = [
        "| recipe | ranks | load | none MB | full MB | budget MB | predicted MB | real MB | difference |",
        "|--|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for shipped in recipes:
        say(shipped.name)
        try:
            done = apply_plan(shipped)
        except UsageError as error:
            say(f"{shipped.name} is left out: {error}")
            continue
        plan = done.plan
        sizes = (plan.none_peak_bytes, done.full, plan.budget_bytes, plan.peak_bytes)
        load = "" if done.load is None else f"{done.load:.2f}"
        real = ", ".join(f"{size / 1e6:.2f}" for size in done.real)
        lines.append(
            f"| {shipped.name} | {shipped.ranks} | {load} | {' | '.join(f'{size / 1e6:.2f}' for size in sizes)} | "
            f"{real} | {done.error:+.2%} |"
        )
        say(f"{lines[-1]}\n{plan}")
    return "\n".join(lines)
