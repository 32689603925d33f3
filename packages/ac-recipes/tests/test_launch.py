"""Ranks are started, heard, and ended."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ac_recipes.training.checkpoint import whole_checkpoints

DIVERGING = ["--optimizer.lr=1e30", "--lr_scheduler.lr_warmup_steps=0", "--clip_grad_norm.max_norm=null"]


def command(*arguments, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "ac_recipes", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process, timeout=120):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"hung; it had printed\n{out}\n{err}")
    return process.returncode, out, err


def test_the_error_of_a_rank_is_shown_once(tiny_file):
    code, out, err = outcome(command("train", str(tiny_file), "--nproc-per-node", "2", *DIVERGING))
    assert code == 1, out + err
    assert len([line for line in err.splitlines() if "Try a smaller optimizer.lr" in line]) == 1, err
    assert err.startswith("ac-recipes: rank "), err
    assert "Traceback" not in err


def test_ranks_end_when_their_launcher_is_killed(tiny_file):
    launcher = command("train", str(tiny_file), "--nproc-per-node", "2", "--step_scheduler.max_steps", "100000")
    try:
        deadline = time.monotonic() + 120
        while not (lines := launcher.stdout.readline()).startswith("step ") and time.monotonic() < deadline:
            assert lines, launcher.communicate()
        workers = children(launcher.pid)
        assert len(workers) == 2
    finally:
        launcher.kill()
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(alive, workers))
    launcher.communicate()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "the environment has WORLD_SIZE but not MASTER_ADDR, MASTER_PORT, RANK"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "--nproc-per-node: another launcher has started this process already",
        ),
    ],
)
def test_a_stray_launcher_environment_is_refused(tiny_file, environment, message):
    code, out, err = outcome(command("train", str(tiny_file), "--nproc-per-node", "2", **environment))
    assert (code, out) == (2, "")
    assert err.startswith(f"ac-recipes: {message}")


def test_training_goes_on_when_the_reader_of_its_output_leaves(tiny_file):
    process = command("train", str(tiny_file))
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (run,) = (tiny_file.parent / "runs").iterdir()
    assert (run / "checkpoints" / "step-00000006").is_dir()


def test_a_signal_to_the_launcher_saves_on_all_ranks_and_ends_well(tiny_file):
    endless = ["--step_scheduler.max_steps", "100000", "--step_scheduler.ckpt_every_steps", "null"]
    process = command("train", str(tiny_file), "--nproc-per-node", "2", *endless)
    while not (line := process.stdout.readline()).startswith("step 2"):
        assert line, process.communicate()
    process.send_signal(signal.SIGTERM)
    code, out, err = outcome(process)
    assert code == 0, out + err
    (run,) = (tiny_file.parent / "runs").iterdir()
    (checkpoint,) = whole_checkpoints(run / "checkpoints")
    assert checkpoint.world_size == 2
    resume = f"ac-recipes train {tiny_file} --nproc-per-node 2 {' '.join(endless)} --resume {run}"
    assert out.splitlines()[-1] == f"stopped by SIGTERM after step {checkpoint.step}; go on with: {resume}"


def children(pid):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = file.read().rpartition(")")[2].split()[1]
                with open(f"/proc/{entry}/cmdline") as file:
                    is_rank = "ac_recipes" in file.read()
            except OSError:
                continue
            if int(parent) == pid and is_rank:
                found.append(int(entry))
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
