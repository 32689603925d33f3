"""Every example runs, prints its report and shows that checkpointing was on."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "plain_loop": (),
    "hf_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("transformers", "accelerate"),
    "lightning_fabric": ("lightning",),
    "peft_lora": ("transformers", "peft"),
}

THEN_EXIT = """\
import os, runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
sys.stdout.flush()
os._exit(0)  # ranks that have used gloo may be aborted in the interpreter's finalisation
"""


def run(command, folder):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def skip_without(libraries):
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: hatch run examples:test")


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_example_runs_with_checkpointing_on(name, tmp_path):
    skip_without(NEEDS[name])
    out = run([str(EXAMPLES / f"{name}.py")], tmp_path)
    assert "-> applied to" in out
    assert "checkpointing was on" in out


def test_accelerate_on_two_processes(tmp_path):
    skip_without(NEEDS["accelerate_loop"])
    script = tmp_path / "then_exit.py"
    script.write_text(THEN_EXIT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = run([*launch, str(script), str(EXAMPLES / "accelerate_loop.py")], tmp_path)
    assert out.count("checkpointing was on") == 1  # printed by the main process; the check is made on both
