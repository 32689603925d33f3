"""`ac-recipes plan RECIPE --budget SIZE`: the cheapest checkpointing that fits, block by block."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ac_recipes.analysis.policies import BUDGET_FIELD, BUDGET_FLAG, budget_policy, parse_budget_argument
from ac_recipes.cli.estimate import assumed, device_arguments, step_text
from ac_recipes.cli.show import (
    check_output,
    check_picture,
    draw,
    overwrite_argument,
    picture_argument,
    progress,
    recipe_argument,
    recipe_to_look_at,
    uncompiled_note,
)
from ac_recipes.errors import UsageError
from ac_recipes.reader import Override

_KEYS = ("budget_bytes", "peak_bytes", "recompute_flops", "blocks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this verb."""
    recipe_argument(parser)
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="of a step at its peak: 24GiB, 24GB, bytes, 0.5 or 50%% of what it takes without checkpointing, or "
        "'device'; without it, the recipe's memory_budget",
    )
    device_arguments(parser)
    parser.add_argument("--write", metavar="FILE", help="save the recipe with the plan in it; its comments are kept")
    picture_argument(parser, "memory against recompute, the plan and the fixed policies in it")
    overwrite_argument(parser)
    parser.epilog = f"{parser.epilog} Exit codes: 0 planned; 2 nothing fits, or a mistake, told with the remedy."


def run(options: argparse.Namespace, overrides: Sequence[Override], _arguments: list[str]) -> int:
    """Plan. What fits no plan is a budget to be mended: nothing is written, and the exit code is 2."""
    budget = None if options.budget is None else parse_budget_argument(options.budget)
    check_picture(options.picture, overwrite=options.overwrite)
    if options.write is not None:
        check_output("--write", options.write, overwrite=options.overwrite)
    recipe = recipe_to_look_at(options.recipe, overrides)
    own = recipe.distributed.checkpointing
    if budget is None and own.memory_budget is None:
        raise UsageError("--budget: neither it nor the recipe's memory_budget is given; give one, such as 24GiB or 50%")
    with progress("plan") as say:
        say("simulating steps without values")
        from ac_recipes.analysis.planning import make_plan

        asked, named = (own, BUDGET_FIELD) if budget is None else (budget_policy(own, budget), BUDGET_FLAG)
        plan = make_plan(recipe, asked, named=named, **assumed(options))
    notes = [note] if (note := uncompiled_note(recipe, "a compiler chooses anew what blocks keep")) else []
    if options.write is not None:
        from ac_recipes.analysis.writing import write_planned

        kept = write_planned(options.recipe, overrides, recipe, plan, Path(options.write), overwrite=options.overwrite)
        notes.append(f"recipe: {options.write}" + ("" if kept else " (every setting written out, without comments)"))
    if options.picture:
        draw(plan.save_picture, options.picture)
        notes.append(f"picture: {options.picture}")
    if options.json:
        plain = plan.to_dict()
        print(json.dumps({key: plain[key] for key in _KEYS}))
        return 0
    print(f"{plan}\n")
    print(f"predicted for {step_text(recipe, options.device, options.kernels)}; ac-recipes compare measures it")
    for note in notes:
        print(note)
    return 0
