"""`ac-recipes verify RECIPE`: checkpointing on against off, bit for bit."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ac_core.sizes import size_text
from ac_recipes.cli.show import flops, progress, recipe_argument, recipe_to_look_at, uncompiled_note
from ac_recipes.reader import Override
from ac_recipes.tables import print_table

if TYPE_CHECKING:
    from ac_recipes.analysis.verifying import VerifiedRecipe

_KINDS = ("loss", "gradients", "buffers", "rng")
_SHOWN = 20
"""Differences that are listed."""
_NOT_COMPILED = "a compiler may round otherwise with checkpointing than without; compare compiles every side"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this verb."""
    recipe_argument(parser)


def run(options: argparse.Namespace, overrides: Sequence[Override], _arguments: list[str]) -> int:
    """Verify; 0 if all is equal, 1 if not."""
    recipe = recipe_to_look_at(options.recipe, overrides)
    with progress("verify") as say:
        say("loading torch")
        from ac_recipes.analysis.verifying import verify_recipe

        result = verify_recipe(recipe, say=say)
    if options.json:
        print(json.dumps(result.to_dict() | {"compiled": False}))
    else:
        _show(result)
    return 0 if result.verification.equal else 1


def _show(result: "VerifiedRecipe") -> None:
    verification = result.verification
    shape = " x ".join(map(str, result.subject.batch["labels"].shape))
    print(f"activation checkpointing on against off, {shape} tokens, {result.subject.device.type}, not compiled\n")
    print(verification.report)
    print()
    rows = []
    for kind in _KINDS:
        found = getattr(verification, kind)
        verdict = "equal, bit for bit" if found else f"{len(found.differences)} differ"
        rows.append((kind, str(found.compared), verdict if found.compared else "none there"))
    print_table(("what", "compared", "with checkpointing"), rows, numbers=("compared",))
    print()
    sides = (("without", result.without), ("with", result.with_checkpointing))
    columns = ("checkpointing", "saved for the backward", "peak above the model", "run again")
    figures = [(n, size_text(u.saved_bytes), size_text(u.peak_bytes), flops(u.recompute_flops)) for n, u in sides]
    print_table(columns, figures, numbers=columns[1:])
    print()
    if note := uncompiled_note(result.subject.recipe, _NOT_COMPILED):
        print(f"{note}\n")
    differences = [d for kind in _KINDS for d in getattr(verification, kind).differences]
    for difference in differences[:_SHOWN]:
        print(f"{difference.kind}: {difference}")
    if len(differences) > _SHOWN:
        print(f"... and {len(differences) - _SHOWN} more")
    for difference in verification.unstable[:_SHOWN]:
        print(f"differs from itself without checkpointing: {difference.kind}: {difference}")
    if verification.idle:
        print(f"not called in this step, so not verified: {', '.join(verification.idle)}")
    if not verification.deterministic:
        print("no verdict: the model does not repeat itself without checkpointing (torch.use_deterministic_algorithms)")
    else:
        print("equal" if verification.equal else "NOT equal")
