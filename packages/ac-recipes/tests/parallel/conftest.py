"""Training on several gloo ranks in one launch, under a timeout that ends them all."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ac_recipes.reader import dump
from ac_recipes.recipe import Recipe

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
    """`train_on_ranks(2, recipe, (recipe, run_to_resume), ...)`: their run folders."""

    def run(ranks: int, *asked: Recipe | tuple[Recipe, Path]) -> list[Path]:
        jobs = []
        for number, one in enumerate(asked):
            recipe, resume = one if isinstance(one, tuple) else (one, None)
            path = tmp_path / f"job{ranks}_{number}.yaml"
            path.write_text(dump(recipe))
            jobs.append((str(path), resume and str(resume)))
        script = tmp_path / "rank.py"
        script.write_text(RANK)
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
