"""`ac-recipes estimate RECIPE`: what a step will need under each policy, without weights and without a GPU."""

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ac_recipes.analysis.policies import parse_budget_argument
from ac_recipes.analysis.words import words_for
from ac_recipes.cli.show import (
    Sizes,
    check_picture,
    draw,
    flops,
    overwrite_argument,
    picture_argument,
    progress,
    recipe_argument,
    recipe_to_look_at,
    uncompiled_note,
)
from ac_recipes.reader import Override
from ac_recipes.recipe import Recipe
from ac_recipes.tables import print_table

if TYPE_CHECKING:
    from ac_core import Estimate

_FIGURES = (
    "peak_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "activation_bytes",
    "loss_bytes",
    "recompute_flops",
)
_PARTS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "head and loss": ("loss",),
    "other": ("communication", "temporaries"),
}
"""What a peak is made of: columns, and the categories of `Estimate.at_peak` in each."""

_COLUMNS = ("policy", "peak", *_PARTS, "run again (of forward)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this verb."""
    recipe_argument(parser)
    device_arguments(parser)
    parser.add_argument(
        "--budget", metavar="SIZE", help="also the policy 'budget': 24GiB, 24GB, 0.5 or 50%% of what no policy takes"
    )
    picture_argument(parser, "the memory of a step over time, under the recipe's own policy")
    overwrite_argument(parser)


def device_arguments(parser: argparse.ArgumentParser) -> None:
    """What is assumed of the machine that will train."""
    parser.add_argument(
        "--kernels",
        choices=("plain", "fused"),
        default="plain",
        help="plain (default): each operation by itself; fused: norms and gated activations in one kernel each",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="whose kernels and optimizer are assumed (default: cuda); none of them has to be here",
    )
    parser.add_argument(
        "--expert-load",
        type=expert_load_of,
        metavar="TIMES",
        help="where ranks share experts: the rows that those of the busiest rank get, over an even share (default: 1)",
    )


def expert_load_of(text: str) -> float:
    """Of the command line. Raises argparse.ArgumentTypeError: it is no finite number."""
    try:
        load = float(text)
    except ValueError:
        load = math.nan
    if not math.isfinite(load):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, such as 1.3")
    return load


def assumed(options: argparse.Namespace) -> dict[str, Any]:
    """What `device_arguments` have brought, as keyword arguments."""
    return {"device": options.device, "kernels": options.kernels, "expert_load": options.expert_load}


def run(options: argparse.Namespace, overrides: Sequence[Override], _arguments: list[str]) -> int:
    """Estimate every policy."""
    check_picture(options.picture, overwrite=options.overwrite)
    budget = None if options.budget is None else parse_budget_argument(options.budget)
    recipe = recipe_to_look_at(options.recipe, overrides)
    own = str(recipe.distributed.checkpointing.policy)
    with progress("estimate", total=3) as say:
        say("loading torch")
        from ac_recipes.analysis.estimating import estimate_policies, stated_assumptions

        found = estimate_policies(recipe, budget=budget, say=say, **assumed(options))
    said = stated_assumptions(recipe, found)
    if note := uncompiled_note(recipe, "a compiler chooses anew what blocks keep"):
        said.append(note)
    if options.picture:
        draw(found[own].save_timeline, options.picture)
    if options.json:
        figures = {name: {field: getattr(e, field) for field in (*_FIGURES, "at_peak")} for name, e in found.items()}
        print(json.dumps({"assumptions": said, "policies": figures, "dominant": found[own].dominant}))
        return 0
    sizes = Sizes(max(estimate.peak_bytes for estimate in found.values()))
    print(f"{options.recipe}: predicted for {step_text(recipe, options.device, options.kernels)}")
    print(f"one rank, in {sizes.unit}; a peak is the sum of what is alive at that moment, which is beside it\n")
    print_table(_COLUMNS, [_row(name, e, own, sizes) for name, e in found.items()], numbers=_COLUMNS[1:])
    advice = found[own].advice.text(words_for(recipe))
    print(f"\n* {own} is the recipe's policy. It is highest in the {found[own].peak_moment}. {advice}")
    print("\nassumed:")
    for assumption in said:
        print(f"  {assumption}")
    if options.picture:
        print(f"\npicture: {options.picture}")
    return 0


def _row(name: str, found: "Estimate", own: str, sizes: Sizes) -> tuple[str, ...]:
    parts = [sum(found.at_peak[category] for category in categories) for categories in _PARTS.values()]
    share = f" ({found.recompute_flops / found.forward_flops:.1%})" if found.recompute_flops else ""
    bytes_of = map(sizes, (found.peak_bytes, *parts))
    return (f"{name} *" if name == own else name, *bytes_of, flops(found.recompute_flops) + share)


def step_text(recipe: Recipe, device: str, kernels: str) -> str:
    """The step that is predicted, in a line."""
    distributed, ranks = recipe.distributed, recipe.distributed.dp_size or recipe.distributed.ep_size
    strategy = f"{distributed.strategy} over {ranks} ranks" if ranks > 1 else "one process"
    local = min(recipe.step_scheduler.local_batch_size, recipe.step_scheduler.global_batch_size // ranks)
    return (
        f"{local} x {recipe.row_length} tokens a rank, {recipe.model.dtype}, {strategy}, "
        f"{recipe.loss_fn.kind} loss, {recipe.optimizer.name}, {device} with {kernels} kernels"
    )
