"""`ac-recipes train RECIPE`: train, on one process or on several."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ac_recipes.cli.show import tell_left_out
from ac_recipes.errors import RunError, UsageError
from ac_recipes.invocation import LAUNCH_FLAGS, Invocation, without
from ac_recipes.launch import Nodes, launch_ranks
from ac_recipes.load import load_translated
from ac_recipes.rank_process import (
    check_environment,
    end_rank,
    end_with_launcher,
    is_worker,
    report_failure,
    speaks_for_all,
    started_by_us,
)
from ac_recipes.reader import Override
from ac_recipes.shipped import find_recipe

NEWEST = object()
"""What `--resume` without RUN says."""

_LAUNCH_OPTIONS = [flag.removeprefix("--").replace("-", "_") for flag in LAUNCH_FLAGS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this verb."""
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="a file, or the name of a shipped recipe; with --resume RUN, by default the one that run has",
    )
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="ranks to start on this machine (default: 1, in this process)"
    )
    parser.add_argument("--nnodes", type=int, metavar="N", help="nodes of the run; the command is started on each")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where the nodes meet: a port of one of them")
    parser.add_argument("--rdzv-id", metavar="ID", help="name of the run among others at that endpoint")
    parser.add_argument("--rdzv-backend", choices=("c10d", "static"), help="how the nodes meet (default: c10d)")
    parser.add_argument("--node-rank", type=int, metavar="R", help="static: which node this is, 0 first")
    parser.add_argument("--master-addr", metavar="HOST", help="static: the node 0")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="static: a free port of node 0")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="RUN",
        help="go on with the run in this folder; without RUN, with the newest run of this recipe",
    )


def run(options: argparse.Namespace, overrides: Sequence[Override], arguments: list[str]) -> int:
    """Validate everything that can be, then train here or in the ranks that a launcher starts."""
    if options.resume is not None and options.resume is not NEWEST and not options.resume.strip():
        raise UsageError(
            "--resume: RUN is empty, as an unset variable leaves it; name the folder of a run, or leave RUN out for "
            "the newest run of this recipe"
        )
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch is loaded; docs/facts.md says why
    if options.recipe is None:
        options.recipe = _recipe_of_run(None if options.resume is NEWEST else options.resume)
        verb = arguments.index("train") + 1
        arguments = [*arguments[:verb], options.recipe, *arguments[verb:]]
    invocation = Invocation.of(arguments)
    asked = {name: value for name in _LAUNCH_OPTIONS if (value := getattr(options, name)) is not None}
    if is_worker() and asked:
        raise UsageError(
            f"--{next(iter(asked)).replace('_', '-')}: another launcher has started this process already (RANK and "
            "WORLD_SIZE are set); leave the argument out, or unset them"
        )
    check_environment()
    if is_worker():
        end_rank(_train(options, overrides, invocation))
    ranks = asked.pop("nproc_per_node", 1)
    if ranks < 1:
        raise UsageError(f"--nproc-per-node: {ranks} is below 1")
    nodes = Nodes(**asked)
    recipe, translator = load_translated(options.recipe, overrides)
    if ranks * nodes.count == 1:
        return _train(options, overrides, invocation)
    from ac_recipes.training.preflight import preflight

    preflight(recipe, world_size=ranks * nodes.count)
    tell_left_out(translator, _stream(options))
    launch_ranks(without(arguments, *LAUNCH_FLAGS), ranks, nodes, invocation)
    return 0


def _recipe_of_run(folder: str | None) -> str:
    """The recipe that a run to be resumed has kept."""
    if not folder:
        raise UsageError("RECIPE: missing; give a file, the name of a shipped recipe, or --resume RUN, a run's folder")
    recipe = Path(folder) / "recipe.yaml"
    if not recipe.is_file():
        raise UsageError(
            f"--resume: {folder} is not the folder of a run (it holds no recipe.yaml); if it is the recipe, write it "
            "before --resume"
        )
    return str(recipe)


def _train(options: argparse.Namespace, overrides: Sequence[Override], invocation: Invocation) -> int:
    end_with_launcher()
    try:
        recipe, translator = load_translated(options.recipe, overrides)
        if speaks_for_all() and not started_by_us():  # else the launcher has told it
            tell_left_out(translator, _stream(options))
        name = find_recipe(options.recipe).stem
        from ac_recipes.training.resume import find_run
        from ac_recipes.training.signals import process_ends_with_run
        from ac_recipes.training.trainer import train

        resume = None
        if options.resume is not None:
            resume = find_run(recipe, name, None if options.resume is NEWEST else options.resume)
        with process_ends_with_run():
            result = train(recipe, name, resume=resume, to_stderr=options.json, invocation=invocation)
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


def _stream(options: argparse.Namespace) -> TextIO:
    """Where the run prints."""
    return sys.stderr if options.json else sys.stdout
