"""A run that is killed goes on from its last whole checkpoint, with the losses it would have had."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ac_recipes.cli import main

STEPS = ["--step_scheduler.max_steps", "8", "--step_scheduler.ckpt_every_steps", "2"]

SAVE_AND_DIE = """
import os, signal, sys
import torch.distributed.checkpoint as dcp
from ac_recipes.cli import main

save, sync = dcp.save, os.fsync
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def save_and_die(state, checkpoint_id, **options):
    save(state, checkpoint_id=checkpoint_id, **options)
    if "step-00000006" in str(checkpoint_id):
        die()
def die_in_the_middle_of_a_file(descriptor):
    if "step-00000006" in os.readlink(f"/proc/self/fd/{descriptor}"):
        die()
    sync(descriptor)
if sys.argv[1] == "written":
    dcp.save = save_and_die
else:
    os.fsync = die_in_the_middle_of_a_file
main(sys.argv[2:])
"""


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def expected(new_command_line):
    return {step: line["loss"] for step, line in new_command_line().train(*STEPS).items()}


@pytest.mark.parametrize("moment", ["between", "writing", "written"])
def test_resume_after_sigkill_is_bit_equal(ac_recipes, expected, moment, monkeypatch, capsys):
    if moment == "between":
        process = ac_recipes.start("train", "small.yaml", *STEPS)
        for line in process.stdout:
            if line.startswith("step 4/8 | checkpoint"):
                break
        os.kill(process.pid, signal.SIGKILL)
    else:
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_AND_DIE, moment, "train", "small.yaml", *STEPS],
            cwd=ac_recipes.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    run = only_run(ac_recipes.folder)
    whole = sorted(path.name for path in (run / "checkpoints").iterdir() if path.suffix != ".partial")
    assert whole[:2] == ["step-00000002", "step-00000004"]
    if moment != "between":
        assert (run / "checkpoints" / "step-00000006.partial").exists()
        assert len(whole) == 2
    monkeypatch.chdir(ac_recipes.folder)
    assert main(["train", "small.yaml", "--resume", *STEPS]) == 0
    assert f"resumed from {Path('runs') / run.name / 'checkpoints' / whole[-1]}" in capsys.readouterr().out
    assert {step: line["loss"] for step, line in ac_recipes.metrics(run).items()} == expected
