"""`ac-recipes compare RECIPE`: the policies side by side, measured; does checkpointing do what it should here?"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ac_core.sizes import counted, size_text
from ac_recipes.analysis.policies import parse_budget_argument
from ac_recipes.cli.show import (
    check_output,
    flops,
    overwrite_argument,
    progress,
    recipe_argument,
    recipe_to_look_at,
)
from ac_recipes.errors import RunError, UsageError
from ac_recipes.reader import Override
from ac_recipes.shipped import find_recipe
from ac_recipes.tables import print_table

if TYPE_CHECKING:
    from ac_recipes.analysis.comparing import ComparedRecipe

_COLUMNS = ("policy", "peak", "saved", "step", "against none", "run again (of forward)", "loss", "loss - none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this verb."""
    recipe_argument(parser)
    parser.add_argument(
        "--budget", metavar="SIZE", help="also the policy 'budget': 24GiB, 24GB, 0.5 or 50%% of what no policy takes"
    )
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds of the timing (default: 7)")
    parser.add_argument("--compile", action="store_true", help="compile the blocks, under every policy")
    parser.add_argument("--report", metavar="FILE", help="the HTML report (default: compare-NAME.html, anew each time)")
    overwrite_argument(parser)


def run(options: argparse.Namespace, overrides: Sequence[Override], _arguments: list[str]) -> int:
    """Measure every policy; 1 if a loss differs from that without checkpointing."""
    if options.rounds < 1:
        raise UsageError(f"--rounds: {options.rounds} is below 1")
    budget = None if options.budget is None else parse_budget_argument(options.budget)
    recipe = recipe_to_look_at(options.recipe, overrides)
    name = find_recipe(options.recipe).stem
    path = Path(options.report or f"compare-{name}.html")
    check_output("--report", str(path), overwrite=options.overwrite or not options.report)
    with progress("compare") as say:
        say("loading torch")
        from ac_recipes.analysis.comparing import compare_policies
        from ac_recipes.analysis.report import html_report

        compared = compare_policies(recipe, budget=budget, rounds=options.rounds, compiled=options.compile, say=say)
    if not compared.measured:
        raise RunError("no policy fits this device; ac-recipes estimate RECIPE tells what each needs")
    rows = [_row(compared, policy) for policy in compared.measured]
    rows += [(policy, "out of memory", *[""] * (len(_COLUMNS) - 2)) for policy in compared.failed]
    try:
        path.write_text(html_report(name, compared, _COLUMNS, rows), encoding="utf-8")
    except OSError as error:
        raise RunError(f"--report: cannot write {path}: {error.strerror or error}") from error
    if options.json:
        print(json.dumps(compared.to_dict() | {"report": str(path)}))
    else:
        _show(options.recipe, compared, rows, path)
    differing = [policy for policy in compared.measured if compared.loss_difference(policy)]
    if differing and not compared.compiled:  # a compiler is free to round otherwise
        print(
            f"ac-recipes: the loss under {', '.join(differing)} is not that without checkpointing; ac-recipes verify "
            "tells what differs",
            file=sys.stderr,
        )
        return 1
    return 0


def _row(compared: "ComparedRecipe", policy: str) -> tuple[str, ...]:
    from ac_recipes.analysis.noise import LEAST_ROUNDS

    measured = compared.measured[policy]
    none = compared.measured.get("none")
    difference = compared.loss_difference(policy)
    share = f" ({measured.recompute_flops / measured.forward_flops:.1%})" if measured.recompute_flops else ""
    if none is None or policy == "none":
        against = ""
    else:
        noise = ", within noise" if compared.is_within_noise(policy) else ""
        if len(measured.seconds) < LEAST_ROUNDS:
            noise = ", too few rounds"
        against = f"{measured.step_seconds / none.step_seconds - 1:+.1%}{noise}"
    return (
        policy,
        size_text(measured.peak_bytes),
        size_text(measured.saved_bytes),
        f"{measured.step_seconds:.4g} s",
        against,
        flops(measured.recompute_flops) + share,
        f"{measured.loss:.6f}",
        "" if difference is None else f"{difference:g}",
    )


def _show(recipe: str, compared: "ComparedRecipe", rows: list[tuple[str, ...]], path: Path) -> None:
    from ac_recipes.analysis.noise import LEAST_ROUNDS, RULE
    from ac_recipes.analysis.report import compiled_text

    shape = " x ".join(map(str, compared.subject.batch["labels"].shape))
    rounds = len(next(iter(compared.measured.values())).seconds)
    where = compared.subject.device.type
    print(f"{recipe}: a whole training step on {shape} tokens, {where}, {compiled_text(compared)}\n")
    print_table(_COLUMNS, rows, numbers=_COLUMNS[1:])
    print(f"\ntime: median of {counted(rounds, 'round')}. {RULE}")
    if rounds < LEAST_ROUNDS:
        print(f"{counted(rounds, 'round')}: too few to tell; give --rounds {LEAST_ROUNDS} or more")
    if compared.failed:
        print("out of memory: ac-recipes estimate RECIPE tells what that needs")
    print(f"report: {path}")
