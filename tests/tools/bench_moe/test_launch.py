import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench_moe.launch import RanksError, supervise
from tools.bench_moe.rank import ORPHANED

ROOT = Path(__file__).parents[3]
HANG = """
import faulthandler, os, pathlib, signal, sys, time
faulthandler.register(signal.SIGUSR1)
note = pathlib.Path(sys.argv[1])
note.with_suffix(".new").write_text(str(os.getpid()))
note.with_suffix(".new").rename(note)
time.sleep(1000)
"""


FAIL = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
raise ValueError("a reason")
"""


def hanging(note: Path) -> list[str]:
    """A process that writes its number into `note` and hangs."""
    return [sys.executable, "-c", HANG, str(note)]


def gone(note: Path) -> bool:
    try:
        os.kill(int(note.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_ranks_that_hang_are_killed_and_say_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    notes = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(RanksError, match=r"ranks 0, 1 were not done after 5 seconds"):
        supervise([hanging(note) for note in notes], timeout=5)
    assert all(map(gone, notes))
    assert capfd.readouterr().err.count("most recent call first") == 2


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    note = tmp_path / "0"
    with pytest.raises(RanksError, match="rank 1 ended with status 1"):
        supervise([hanging(note), [sys.executable, "-c", FAIL, str(note)]], timeout=900)
    assert gone(note)
    assert "ValueError: a reason" in capfd.readouterr().err


def test_what_ranks_print_leaves_standard_output_alone(capfd: pytest.CaptureFixture[str]):
    supervise([[sys.executable, "-c", "print('from a rank')"]], timeout=60)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "from a rank\n")


def test_a_rank_ends_with_its_parent(tmp_path: Path):
    command = [sys.executable, "-m", "tools.bench_moe.rank", str(tmp_path), "0"]
    os.mkfifo(tmp_path / "settings.pickle")  # it would wait for ever to read what to do
    rank = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
    try:
        rank.stdin.close()
        assert rank.wait(60) == ORPHANED
    finally:
        rank.kill()
