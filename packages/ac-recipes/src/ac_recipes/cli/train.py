"""`ac-recipes train RECIPE`: train, on one process or on several."""

import argparse
import json
import os
from collections.abc import Sequence

from ac_recipes.errors import RunError, UsageError
from ac_recipes.launch import check_environment, end_rank, end_with_launcher, is_worker, launch_ranks, report_failure
from ac_recipes.load import load_recipe
from ac_recipes.reader import Override
from ac_recipes.shipped import find_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this verb."""
    parser.add_argument("recipe", metavar="RECIPE", help="a file, or the name of a shipped recipe")
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="ranks to start on this machine (default: 1, in this process)"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on with the run in this folder; without RUN, with the newest run of this recipe",
    )


def run(options: argparse.Namespace, overrides: Sequence[Override], arguments: list[str]) -> int:
    """Validate everything that can be, then train here or in the ranks that a launcher starts."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch is loaded; docs/facts.md says why
    ranks = options.nproc_per_node
    if ranks is not None and ranks < 1:
        raise UsageError(f"--nproc-per-node: {ranks} is below 1")
    check_environment()
    if is_worker() and ranks is not None:
        raise UsageError(
            "--nproc-per-node: another launcher has started this process already (RANK and WORLD_SIZE are set); leave "
            "the argument out, or unset them"
        )
    if is_worker():
        end_rank(_train(options, overrides))
    recipe = load_recipe(options.recipe, overrides)
    if ranks in (None, 1):
        return _train(options, overrides)
    from ac_recipes.training.preflight import preflight

    preflight(recipe, world_size=ranks)
    launch_ranks(_without(arguments, "--nproc-per-node"), ranks)
    return 0


def _train(options: argparse.Namespace, overrides: Sequence[Override]) -> int:
    end_with_launcher()
    try:
        recipe = load_recipe(options.recipe, overrides)
        name = find_recipe(options.recipe).stem
        from ac_recipes.training.resume import find_run
        from ac_recipes.training.trainer import train

        resume = None if options.resume is None else find_run(recipe, name, options.resume)
        result = train(recipe, name, resume=resume, to_stderr=options.json)
    except (RunError, UsageError) as error:
        if report_failure(error):
            return error.exit_code
        raise
    except Exception as error:
        report_failure(error)
        raise
    if options.json and result.is_first:
        print(json.dumps(result.to_dict()))
    return 0


def _without(arguments: list[str], flag: str) -> list[str]:
    """The arguments less a flag and its value, in both spellings."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == flag:
            skip = True
        elif not argument.startswith(f"{flag}="):
            kept.append(argument)
    return kept
