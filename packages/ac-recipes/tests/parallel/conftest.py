"""Training on several gloo ranks in one launch, under a timeout that ends them all."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ac_recipes.reader import dump
from ac_recipes.recipe import Recipe
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.run_folder import RunFolder

RANK = """
import json, os, sys
import torch.distributed as dist
from ac_recipes.reader import read_recipe
from ac_recipes.recipe import Recipe
from ac_recipes.training.trainer import train

runs = []
for path, resume in json.loads(sys.argv[1]):
    from pathlib import Path
    result = train(read_recipe(Recipe, Path(path)), Path(path).stem, resume=resume and Path(resume), to_stderr=True)
    runs.append(str(result.run))
if result.is_first:
    print(json.dumps(runs), flush=True)
dist.barrier()
os._exit(0)  # docs/facts.md: gloo may abort or hang when its group is destroyed
"""


@pytest.fixture
def train_on_ranks(tmp_path: Path) -> Callable[..., list[Path]]:
    """`train_on_ranks(2, recipe, (recipe, run_to_resume), ...)`: their run folders. `prelude`: what ranks run first."""

    def run(ranks: int, *asked: Recipe | tuple[Recipe, Path], prelude: str = "") -> list[Path]:
        jobs = []
        for number, one in enumerate(asked):
            recipe, resume = one if isinstance(one, tuple) else (one, None)
            path = tmp_path / f"job{ranks}_{number}.yaml"
            path.write_text(dump(recipe))
            jobs.append((str(path), resume and str(resume)))
        script = tmp_path / "rank.py"
        script.write_text(prelude + RANK)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        process = subprocess.Popen(
            [*launcher, str(script), json.dumps(jobs)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a timeout can end the ranks as well
        )
        try:
            out, err = process.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"the ranks hung; they had printed\n{out}\n{err}")
        assert process.returncode == 0, err
        return [Path(run) for run in json.loads(out)]

    return run


SHORT = ("step_scheduler.max_steps=3", "step_scheduler.val_every_steps=null", "step_scheduler.ckpt_every_steps=null")


@pytest.fixture
def short(tiny: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """The tiny recipe for three steps, with overrides."""
    return lambda *settings: tiny(*SHORT, *settings)


@pytest.fixture
def assert_alike() -> Callable[[Path, Path, str], None]:
    """`assert_alike(run, other_run, case)`: the same losses, gradient norms and weights, up to rounding."""
    return _assert_alike


@pytest.fixture
def assert_steps_alike() -> Callable[[Path, Path, str], None]:
    """The same without the weights."""
    return _assert_steps_alike


def _metrics(run: Path) -> list[dict]:
    return [line for line in RunFolder(run).read_metrics() if "loss" in line]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    newest = whole_checkpoints(run / "checkpoints")[-1].path
    dcp_to_torch_save(newest, run / "weights.pt")
    return torch.load(run / "weights.pt")["model"]


def _assert_steps_alike(run: Path, alone: Path, case: str) -> None:
    assert len(_metrics(run)) == len(_metrics(alone)), case
    for ours, theirs in zip(_metrics(run), _metrics(alone), strict=True):
        assert math.isclose(ours["loss"], theirs["loss"], rel_tol=1e-5), (case, ours, theirs)
        assert math.isclose(ours["grad_norm"], theirs["grad_norm"], rel_tol=1e-4), (case, ours, theirs)


def _assert_alike(run: Path, alone: Path, case: str) -> None:
    _assert_steps_alike(run, alone, case)
    ours, theirs = _weights(run), _weights(alone)
    assert ours.keys() == theirs.keys(), case
    for name, weight in theirs.items():
        # Adam divides by the gradient's size: rounding shows where a gradient is nearly zero.
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{case}, {n}: {m}")
