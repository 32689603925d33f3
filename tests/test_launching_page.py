"""The commands of docs/launching.md work as they stand there, on a small model and on this machine."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs/launching.md").read_text()
SCRIPT = re.search(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE).group(1)
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", PAGE.replace(SCRIPT, ""), re.MULTILINE)]

SRUN = """#!/bin/bash
# What srun does on two nodes with a task each, without Slurm: the command twice, at once.
"$@" & one=$!
"$@" & two=$!
wait $one && wait $two
"""


@pytest.fixture
def shell(ac_recipes, tmp_path):
    """A folder of programs that come first, and a port in place of the page's."""
    programs = tmp_path / "bin"
    programs.mkdir()
    contents = {
        "ac-recipes": f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m ac_recipes "$@"\n',
        "torchrun": f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n',
        "srun": SRUN,
        "scontrol": "#!/bin/bash\necho localhost\necho node1\n",
    }
    for name, text in contents.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]

    def run(*command, **environment):
        done = subprocess.run(
            [part.replace("29500", str(port)) for part in command],
            check=False,
            cwd=ac_recipes.folder,
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def small(command):
    return ["small.yaml" if word == "default" else word for word in command] + ["--step_scheduler.max_steps", "1"]


def test_the_page_has_these_commands():
    assert [command[:3] for command in COMMANDS] == [
        ["ac-recipes", "train", "default"],
        ["ac-recipes", "train", "default"],
        ["torchrun", "--nproc-per-node", "2"],
    ]


def test_under_torchrun_it_trains(shell):
    (command,) = [command for command in COMMANDS if command[0] == "torchrun"]
    assert "done: 1 steps" in shell(*small(command))


def test_the_slurm_script_trains_and_goes_on(shell, ac_recipes):
    arguments = "--step_scheduler.max_steps ${STEPS} --rdzv-endpoint"
    script = SCRIPT.replace("--rdzv-endpoint", arguments)  # short, and otherwise as it stands there
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "RECIPE": "small.yaml"}
    assert "done: 1 steps" in shell("bash", "-c", script, STEPS="1", **slurm)
    again = shell("bash", "-c", script, STEPS="2", **slurm)
    assert "resumed from " in again
    assert "done: 2 steps" in again
    (run,) = (ac_recipes.folder / "runs" / "7").iterdir()
    starts = [json.loads(line) for line in (run / "sessions.jsonl").read_text().splitlines()]
    assert [(start["ranks"], start["steps_done"]) for start in starts] == [(2, 0), (2, 1)]
