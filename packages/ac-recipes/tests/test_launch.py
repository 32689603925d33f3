"""Ranks are started, heard, and ended."""

import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ac_recipes.cli import main
from ac_recipes.errors import LostPeerError, RankError, RunError, RunInterruptedError, UsageError
from ac_recipes.invocation import Invocation
from ac_recipes.launch import Nodes, launch_ranks
from ac_recipes.launch import _kept as kept_by_ranks
from ac_recipes.launch import _told as told_of
from ac_recipes.rank_process import KEPT_FILE, PARENT, RUN_FILE, check_environment, leave_run, report_failure, told_as
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.manifest import Checkpoint, damage, record_files, write_manifest
from ac_recipes.training.ranks import ranks_here
from ac_recipes.training.trainer import train

DIVERGING = ["--optimizer.lr=1e30", "--lr_scheduler.lr_warmup_steps=0", "--clip_grad_norm.max_norm=null"]


def command(*arguments, largest_file="unlimited", **environment):
    """largest_file: what the process and its ranks may write of one, in KiB / 2."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        ["sh", "-c", f'ulimit -f {largest_file}; exec "$@"', "sh", sys.executable, "-m", "ac_recipes", *arguments],
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


def test_a_save_that_fails_after_a_signal_is_told_as_such(tiny_file):
    """A real failure: no file may have more than 60 KiB, and the checkpoint's has."""
    endless = ["--step_scheduler.max_steps", "100000", "--step_scheduler.ckpt_every_steps", "null"]
    process = command("train", str(tiny_file), "--nproc-per-node", "2", *endless, largest_file=120)
    while not (line := process.stdout.readline()).startswith("step 2"):
        assert line, process.communicate()
    process.send_signal(signal.SIGTERM)
    code, _, err = outcome(process)
    assert code == 1, err
    (line,) = err.splitlines()
    assert re.match(
        r"ac-recipes: rank \d: .*File too large, while the checkpoint of step \d+ was written; no checkpoint was "
        r"written yet. Raise the limit on the size of a file .*, and start the run anew; the other ranks were ended$",
        line,
    )


def test_a_disk_that_is_full_while_the_ranks_set_up_is_told_once(tiny_file):
    code, _, err = outcome(command("train", str(tiny_file), "--nproc-per-node", "2", largest_file=15))
    assert code == 1, err
    (line,) = err.splitlines()
    assert re.match(r"ac-recipes: rank 0: .*/tokenizer\.json: File too large, while the run was set up; ", line)


def failed(exitcode, message=None, timestamp=0):
    """What torch's launcher knows of a rank that failed."""
    data = {"message": {"message": message}} if message else {"message": "<NONE>"}
    name = signal.Signals(-exitcode).name if exitcode < 0 else ""
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, error_file_data=data, signal_name=lambda: name)


TERM = signal.SIGTERM
SAVE_FAILED = "RankError: the disk is full"
INTERRUPTED = "RunInterruptedError: ended by SIGTERM; nothing is saved"


@pytest.mark.parametrize(
    ("failures", "asked", "kind", "code", "said"),
    [
        ([failed(-TERM), failed(1, SAVE_FAILED)], TERM, RunError, 1, "rank 1: the disk is full; the other ranks were"),
        ([failed(1, SAVE_FAILED)], None, RunError, 1, "rank 0: the disk is full; the other ranks were ended"),
        ([failed(143, INTERRUPTED)] * 2, TERM, RunError, 143, "ended by SIGTERM; nothing is saved"),
        ([failed(2, "UsageError: 3 ranks")], TERM, UsageError, 2, "3 ranks"),
        ([failed(-TERM), failed(1, "LostPeerError: a")], TERM, RunInterruptedError, 143, "ended by SIGTERM; KEPT"),
        ([failed(130)], signal.SIGINT, RunInterruptedError, 130, "ended by SIGINT; KEPT"),
        ([failed(-9)], TERM, RunError, 1, "rank 0: ended by SIGKILL, which is how Linux ends a process when the"),
        ([failed(-TERM)], None, RunError, 1, "rank 0: ended by SIGTERM; the other ranks were ended; KEPT"),
        ([failed(1, "KeyError: ")], None, RunError, 1, "rank 0: KeyError; the other ranks were ended"),
    ],
)
def test_what_a_rank_left_is_said_also_when_a_signal_had_asked_it_to_end(failures, asked, kind, code, said):
    error = told_of(dict(enumerate(failures)), asked, lambda: "KEPT")
    assert (type(error), error.exit_code) == (kind, code)
    assert str(error).startswith(said)
    assert str(error).endswith(("ended", "saved", "ranks", "KEPT"))


def one_of_two(monkeypatch, **environment):
    """This process is what a launcher would have started."""
    right = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in (right | environment).items():
        monkeypatch.setenv(name, value)


def test_the_launcher_finds_what_the_run_of_its_ranks_goes_on_from(tmp_path, monkeypatch):
    invocation, files = Invocation(("train", "my tiny.yaml")), (tmp_path / "kept", tmp_path / "folder")
    assert kept_by_ranks(*files, invocation) == "no checkpoint was written yet; start the run anew"
    one_of_two(monkeypatch, RANK="0", LOCAL_RANK="0")
    monkeypatch.setenv(PARENT, "1")
    monkeypatch.setenv(RUN_FILE, str(files[1]))
    run = tmp_path / "my run"
    leave_run(run)
    assert kept_by_ranks(*files, invocation) == "no checkpoint was written yet; start the run anew"
    checkpoint = run / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    (run / "recipe.yaml").touch()
    (checkpoint / ".metadata").touch()
    write_manifest(Checkpoint(checkpoint, 3, 1, None, record_files(checkpoint)), checkpoint)
    assert kept_by_ranks(*files, invocation) == (
        f"the newest checkpoint is {checkpoint}; go on with: ac-recipes train 'my tiny.yaml' --resume '{run}'"
    )
    files[0].write_text("of a rank")
    assert kept_by_ranks(*files, invocation) == "of a rank"


def test_a_rank_that_cannot_leave_its_error_shows_it_itself(tmp_path, monkeypatch):
    one_of_two(monkeypatch)
    left = tmp_path / "error"
    monkeypatch.setenv(PARENT, "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(left))
    monkeypatch.setenv(KEPT_FILE, str(tmp_path / "kept"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        assert not report_failure(RunError("the disk is full"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not left.exists(), "torch's launcher does not read half of it"
    assert report_failure(RunError("the disk is full"))
    assert "RunError: the disk is full" in left.read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"RANK": "x"}, "the environment has RANK 'x', which is no number"),
        ({"MASTER_PORT": "-1"}, "the environment has MASTER_PORT '-1', which is no number"),
        ({"RANK": "2"}, "the environment has RANK 2, which is none of WORLD_SIZE 2 ranks, 0 first"),
    ],
)
def test_ranks_that_cannot_be_are_refused(monkeypatch, wrong, message):
    one_of_two(monkeypatch, **wrong)
    with pytest.raises(UsageError, match=message):
        check_environment()


def test_a_rank_that_meets_no_other_says_so_in_a_line(monkeypatch):
    """Rank 0 has ended, as one does that refuses the recipe."""
    one_of_two(monkeypatch)

    def reset(*_arguments):
        raise dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes")

    monkeypatch.setattr(dist, "init_process_group", reset)
    with pytest.raises(RankError) as caught:
        ranks_here()
    assert str(caught.value) == (
        "cannot meet the other ranks at localhost:1: Connection reset by peer; another rank has ended and says why, or "
        "MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE do not fit"
    )


@pytest.mark.parametrize(("gpus", "by_the_user", "there"), [(0, None, "FATAL"), (0, "INFO", "INFO"), (8, None, None)])
def test_what_gloo_logs_is_left_to_our_last_words_and_what_nccl_logs_is_shown(monkeypatch, gpus, by_the_user, there):
    seen = []
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    monkeypatch.setattr(os, "environ", environment | ({"TORCH_CPP_LOG_LEVEL": by_the_user} if by_the_user else {}))
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    launch = "torch.distributed.launcher.api.elastic_launch"
    monkeypatch.setattr(launch, lambda *_: lambda *_: seen.append({**os.environ}))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    launch_ranks(["train", "default"], 2, Nodes(), Invocation(("train", "default")))
    assert [found.get("TORCH_CPP_LOG_LEVEL") for found in seen] == [there]
    assert os.environ.keys() == environment.keys() | ({"TORCH_CPP_LOG_LEVEL"} if by_the_user else set())


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
    assert err.splitlines() == told
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
