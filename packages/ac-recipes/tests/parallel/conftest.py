"""Training on several gloo ranks at once, under a timeout that ends them all."""

import json
import math
import multiprocessing
import runpy
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ac_recipes.reader import dump
from ac_recipes.recipe import Recipe
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.run_folder import RunFolder

SECONDS = 280

# Ranks are forked from a process that has imported everything and done nothing yet: that takes a tenth of the seconds
# that an interpreter of its own needs for its imports. What the launcher does is tested with the launcher.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ac_recipes.training.trainer", "transformers.models.llama.modeling_llama"])

HEAD = """
import os, sys
import torch

torch.set_num_threads(1)
for stream, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
"""

RANK = """
import json, os
from pathlib import Path
import torch.distributed as dist
from ac_recipes.reader import read_recipe
from ac_recipes.recipe import Recipe
from ac_recipes.training.trainer import train

runs = []
for path, resume in jobs:
    result = train(read_recipe(Recipe, Path(path)), Path(path).stem, resume=resume and Path(resume), to_stderr=True)
    runs.append(str(result.run))
if result.is_first:
    print(json.dumps(runs), flush=True)
dist.barrier()
os._exit(0)  # docs/facts.md: gloo may abort or hang when its group is destroyed
"""


@pytest.fixture
def train_on_ranks(tmp_path: Path) -> Callable[..., list[str]]:
    """`train_on_ranks(2, recipe, (recipe, run_to_resume), ...)`: their run folders.

    prelude: what ranks run first. script: what they run in place of training `jobs`, `(recipe file, folder to resume or
    None)`; rank 0 prints a list as JSON, and all end with `os._exit(0)`. killed: a rank that is to end by SIGKILL; the
    first of the others prints.
    """

    def run(
        ranks: int,
        *asked: Recipe | tuple[Recipe, str],
        prelude: str = "",
        script: str = RANK,
        killed: int | None = None,
    ) -> list[str]:
        jobs = []
        for number, one in enumerate(asked):
            recipe, resume = one if isinstance(one, tuple) else (one, None)
            path = tmp_path / f"job{ranks}_{number}.yaml"
            path.write_text(dump(recipe))
            jobs.append((str(path), resume and str(resume)))
        shared = {"folder": str(tmp_path), "ranks": ranks, "port": str(_free_port()), "jobs": jobs}
        file = tmp_path / "rank.py"
        file.write_text(f"{HEAD}\n{prelude}\n{script}")
        processes = [
            FORKS.Process(target=runpy.run_path, args=(str(file), shared | {"rank": rank}), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + SECONDS
        # The first that fails ends the others, which would wait for it.
        expected = [-signal.SIGKILL if rank == killed else 0 for rank in range(ranks)]
        while any(p.is_alive() for p in processes) and all(
            p.exitcode in (None, code) for p, code in zip(processes, expected, strict=True)
        ):
            time.sleep(0.02)
            if time.monotonic() > deadline:
                break
        for process in processes:
            process.kill()
            process.join()
        said = "\n".join(path.read_text()[-4000:] for path in sorted(tmp_path.glob("[0-9].err")))
        assert [process.exitcode for process in processes] == expected, said
        speaker = min(rank for rank in range(ranks) if rank != killed)
        return json.loads((tmp_path / f"{speaker}.out").read_text())

    return run


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


SHORT = ("step_scheduler.max_steps=3", "step_scheduler.val_every_steps=null", "step_scheduler.ckpt_every_steps=null")


@pytest.fixture
def short(tiny: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """The tiny recipe for three steps, with overrides."""
    return lambda *settings: tiny(*SHORT, *settings)


@pytest.fixture
def metrics() -> Callable[[Path | str], list[dict]]:
    """`metrics(run)`: its lines with a loss."""
    return _metrics


@pytest.fixture
def assert_alike() -> Callable[[Path | str, Path | str, str], None]:
    """`assert_alike(run, other_run, case)`: the same losses, gradient norms and weights, up to rounding."""
    return _assert_alike


@pytest.fixture
def assert_steps_alike() -> Callable[[Path | str, Path | str, str], None]:
    """The same without the weights."""
    return _assert_steps_alike


def _metrics(run: Path | str) -> list[dict]:
    return [line for line in RunFolder(Path(run)).read_metrics() if "loss" in line]


def _weights(run: Path | str) -> dict[str, torch.Tensor]:
    file = Path(run) / "weights.pt"
    dcp_to_torch_save(whole_checkpoints(Path(run) / "checkpoints")[-1].path, file)
    return torch.load(file)["model"]


def _assert_steps_alike(run: Path | str, alone: Path | str, case: str) -> None:
    assert len(_metrics(run)) == len(_metrics(alone)), case
    for ours, theirs in zip(_metrics(run), _metrics(alone), strict=True):
        assert math.isclose(ours["loss"], theirs["loss"], rel_tol=1e-5), (case, ours, theirs)
        assert math.isclose(ours["grad_norm"], theirs["grad_norm"], rel_tol=1e-4), (case, ours, theirs)


def _assert_alike(run: Path | str, alone: Path | str, case: str) -> None:
    _assert_steps_alike(run, alone, case)
    ours, theirs = _weights(run), _weights(alone)
    assert ours.keys() == theirs.keys(), case
    for name, weight in theirs.items():
        # Adam divides by the gradient's size: rounding shows where a gradient is nearly zero.
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{case}, {n}: {m}")
