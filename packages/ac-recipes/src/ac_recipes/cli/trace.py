"""`ac-recipes trace RECIPE`: what is saved and what is run again, op by op."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ac_core.sizes import counted, size_text
from ac_recipes.cli.show import flops, progress, recipe_argument, recipe_to_look_at, uncompiled_note
from ac_recipes.reader import Override
from ac_recipes.tables import print_table

if TYPE_CHECKING:
    from ac_core import TracedOp

_NOT_COMPILED = "compiled code has no calls to watch one by one; it keeps and runs again what the compiler decides"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this verb."""
    recipe_argument(parser)
    parser.add_argument(
        "--all", action="store_true", help="every call in every block; without it, one row for blocks that are alike"
    )


def run(options: argparse.Namespace, overrides: Sequence[Override], _arguments: list[str]) -> int:
    """Trace one step."""
    recipe = recipe_to_look_at(options.recipe, overrides)
    with progress("trace") as say:
        say("two steps of the model, the second watched")
        from ac_recipes.analysis.tracing import OpRow, summary, trace_recipe

        trace = trace_recipe(recipe)
    if options.json:
        print(json.dumps(trace.to_dict() | {"compiled": False}))
        return 0

    def cells(row: OpRow) -> tuple[str, ...]:
        shape = "x".join(map(str, row.shape))
        counted = flops(row.flops) if row.flops else ""
        return (row.decision, row.blocks, row.layer, row.op, str(row.calls), shape, size_text(row.nbytes), counted)

    rows = [row for traced in trace.ops for row in summary([traced])] if options.all else summary(trace.ops)
    columns = ("decision", "block", "layer", "op", "calls", "output", "bytes", "FLOPs")
    print_table(columns, [cells(row) for row in rows], numbers=("calls", "bytes", "FLOPs"))
    print("\neach op, over all layers:")
    print(trace)
    print(f"\n{_totals(trace.ops)}")
    if note := uncompiled_note(recipe, _NOT_COMPILED):
        print(note)
    return 0


def _totals(ops: "Sequence[TracedOp]") -> str:
    """How many calls, and how much of the work of the forward, each decision has: they add up to all."""
    names = {"SAVE": "saved", "RECOMPUTE": "run again", "NEITHER": "neither"}
    chosen = {name: [traced for traced in ops if traced.decision == decision] for decision, name in names.items()}
    calls = ", ".join(f"{len(several)} {name}" for name, several in chosen.items())
    work = ", ".join(f"{flops(sum(traced.flops for traced in several))} {name}" for name, several in chosen.items())
    return (
        f"{counted(len(ops), 'call')}: {calls} (the recompute ends before them)\n"
        f"{flops(sum(traced.flops for traced in ops))} in the blocks' forward: {work}"
    )
