"""Two runs never go on in one folder."""

import errno
import fcntl
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from ac_recipes.errors import UsageError
from ac_recipes.training.console import RunConsole
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.run_lock import alone_in
from ac_recipes.training.trainer import Trainer, train

ALONE = Ranks(0, 1, torch.device("cpu"))
SILENT = RunConsole(silent=True)


def test_a_second_run_is_refused_while_the_first_trains_and_deletes_nothing_of_it(tiny, monkeypatch):
    recipe, refused = tiny(), []
    step = Trainer.step

    def while_another_begins(self):
        if self.steps_done == 3:
            (run,) = map(RunFolder, Path(recipe.run.dir).iterdir())
            (run.checkpoints / "step-00000004.partial").mkdir()
            before = sorted(run.path.rglob("*"))
            with pytest.raises(UsageError) as caught:
                train(recipe, "tiny", resume=run.path)
            refused.append(str(caught.value))
            assert sorted(run.path.rglob("*")) == before
        return step(self)

    monkeypatch.setattr(Trainer, "step", while_another_begins)
    run = train(recipe, "tiny").run
    (told,) = refused
    in_use = rf"--resume: {re.escape(str(run))} is in use: process {os.getpid()} on \S+ trains in it\. Wait"
    assert re.match(in_use, told)
    train(tiny("step_scheduler.max_steps=7"), "tiny", resume=run)  # it has ended


def test_the_lock_goes_with_the_process_that_held_it(tmp_path):
    run = RunFolder(tmp_path)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with alone_in(run, ALONE, SILENT):
            os.write(tell, b".")
            signal.pause()
    os.read(ready, 1)
    try:
        with pytest.raises(UsageError, match=rf"process {child} on"), alone_in(run, ALONE, SILENT):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with alone_in(run, ALONE, SILENT):
        assert run.lock.read_text().startswith(f"process {os.getpid()} on ")


def test_a_file_system_without_locks_is_told_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with alone_in(RunFolder(tmp_path), ALONE, RunConsole(silent=False)):
        (told,) = capsys.readouterr().out.splitlines()
    assert told == (
        f"{tmp_path / 'run.lock'} cannot be locked (No locks available): see to it that no other run goes on in this "
        "folder meanwhile"
    )
