"""Ranks are started, heard, and ended."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ac_recipes.cli import main
from ac_recipes.errors import LostPeerError, RankError, RunError
from ac_recipes.rank_process import told_as
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.manifest import damage
from ac_recipes.training.trainer import train

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
    workers = children(process.pid)
    lines = iter(process.stdout.readline, "")
    stopped = next(line for line in lines if line.startswith("stopped by "))
    while process.poll() is None:  # a scheduler may repeat it, to every process
        for pid in [process.pid, *workers]:
            if alive(pid):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    code, out, err = outcome(process)
    assert code == 0, out + err
    (run,) = (tiny_file.parent / "runs").iterdir()
    (checkpoint,) = whole_checkpoints(run / "checkpoints")
    assert checkpoint.world_size == 2
    resume = f"ac-recipes train {tiny_file} --nproc-per-node 2 {' '.join(endless)} --resume {run}"
    assert stopped.strip() == f"stopped by SIGTERM after step {checkpoint.step}; go on with: {resume}"


def test_a_rank_that_is_killed_is_named_and_the_others_end(tiny_file):
    endless = ["--step_scheduler.max_steps", "100000", "--step_scheduler.ckpt_every_steps", "1"]
    launcher = command("train", str(tiny_file), "--nproc-per-node", "2", *endless, "--checkpoint.keep_last", "2")
    while not (line := launcher.stdout.readline()).startswith("step 2/100000 | checkpoint"):
        assert line, launcher.communicate()
    workers = children(launcher.pid)
    victim = next(pid for pid in workers if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    code, _, err = outcome(launcher)
    assert code == 1, err
    told = [line for line in err.splitlines() if line.startswith("ac-recipes: ")]
    assert len(told) == 1, err
    assert told[0].startswith("ac-recipes: rank 1: ended by SIGKILL, "), err
    assert "; the other ranks were ended; the newest checkpoint is " in told[0], err
    assert "go on with: ac-recipes train " in told[0], err
    assert "Traceback" not in err
    assert not any(map(alive, workers))
    (run,) = (tiny_file.parent / "runs").iterdir()
    assert [c for c in whole_checkpoints(run / "checkpoints") if damage(c) is None], "a checkpoint to go on from"


def test_two_nodes_train_as_one_process_does(tiny_file, tiny):
    """Two launchers that meet on this machine, with one rank each."""
    alone = train(tiny(), "tiny")
    together = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "tiny", "--json"]
    nodes = [command("train", str(tiny_file), *together) for _ in range(2)]
    ends = [outcome(node) for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    (printed,) = [out for _, out, _ in ends if out]
    there = json.loads(printed)
    assert there["steps"] == 6
    assert math.isclose(there["loss"], alone.loss, rel_tol=1e-5)
    (session,) = map(json.loads, (Path(there["run"]) / "sessions.jsonl").read_text().splitlines())
    assert session["ranks"] == 2
    assert session["command"] == ["ac-recipes", "train", str(tiny_file), *together]


STATIC = ["--rdzv-backend", "static", "--nnodes", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "0"], "--nnodes: 0 is below 1"),
        (["--nnodes", "2"], "--rdzv-endpoint: missing; 2 nodes with --rdzv-backend c10d need it"),
        (["--rdzv-endpoint", "a:1"], "--rdzv-endpoint: a:1 is for several nodes; give --nnodes as well"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "0"], "--node-rank: 0 is for --rdzv-backend"),
        ([*STATIC, "--master-addr", "a", "--node-rank", "0"], "--master-port: missing; 2 nodes"),
        ([*STATIC, "--rdzv-id", "x"], "--rdzv-id: x is for --rdzv-backend c10d"),
        (
            [*STATIC, "--master-addr", "a", "--master-port", "1", "--node-rank", "2"],
            "--node-rank: 2 is not one of the 2 nodes, 0 first",
        ),
        (["--nnodes", "2", "--rdzv-endpoint", "node0"], "--rdzv-endpoint: 'node0' is not HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:99999"], "--rdzv-endpoint: 99999 is not a port"),
        ([*STATIC, "--master-addr", "a", "--master-port", "0", "--node-rank", "0"], "--master-port: 0 is not a port"),
        (["--nnodes", "2", "--rdzv-endpoint", "no.invalid:29500"], "--rdzv-endpoint: the name no.invalid cannot be"),
        (["--nnodes", "3", "--rdzv-endpoint", "a:1"], "4 sequences cannot be shared evenly by 3 ranks"),
    ],
)
def test_what_nodes_lack_or_would_ignore_is_refused(tiny_file, capsys, arguments, message):
    assert main(["train", str(tiny_file), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_launcher_that_waits_for_another_node_ends_by_a_signal(tiny_file, backend):
    port = free_port()
    static = [*STATIC, "--master-addr", "localhost", "--master-port", str(port), "--node-rank", "0"]
    c10d = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--json"]
    process = command("train", str(tiny_file), *(static if backend == "static" else c10d))
    deadline = time.monotonic() + 120
    while not listens(port) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, out, err = outcome(process, timeout=60)
    if backend == "static":  # in C++, where Python hears nothing
        assert (code, out, err) == (-signal.SIGTERM, "", "")
        return
    assert (code, err) == (143, "ac-recipes: ended by SIGTERM; the ranks were not started yet\n")
    assert json.loads(out) == {"error": "ended by SIGTERM; the ranks were not started yet"}


@pytest.mark.parametrize(
    ("error", "environment", "told"),
    [
        (RunError("NaN"), {}, "NaN"),
        (RunError("NaN"), {"RANK": "0"}, "NaN"),
        (RunError("NaN"), {"RANK": "1"}, None),
        (RankError("disk"), {"RANK": "1"}, "rank 1: disk"),
        (LostPeerError("gone", "kept"), {"RANK": "1"}, None),
        (LostPeerError("gone", "kept", has_saved=True), {"RANK": "1"}, "rank 1: gone"),
    ],
)
def test_under_torchrun_each_error_is_told_by_one_rank(monkeypatch, error, environment, told):
    others = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"} if environment else {}
    for name, value in (environment | others).items():
        monkeypatch.setenv(name, value)
    assert told_as(error) == told


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


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
