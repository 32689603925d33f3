"""What a run was made with is kept: once for each time that it was started."""

import json
import platform
import subprocess

import pytest
import torch

from ac_recipes.invocation import Invocation
from ac_recipes.training.provenance import git_state
from ac_recipes.training.trainer import train


def test_each_start_is_kept_with_all_that_made_it(tiny, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    first = Invocation(("train", "tiny.yaml", "--step_scheduler.max_steps", "2"))
    result = train(tiny("step_scheduler.max_steps=2"), "tiny", invocation=first)
    train(tiny(), "tiny", resume=result.run, invocation=Invocation(("train", "tiny.yaml", "--resume")))
    text = (result.run / "sessions.jsonl").read_text()
    start, again = map(json.loads, text.splitlines())
    assert start["command"] == ["ac-recipes", "train", "tiny.yaml", "--step_scheduler.max_steps", "2"]
    assert (start["steps_done"], again["steps_done"]) == (0, 2)
    assert again["command"][-1] == "--resume"
    assert start["packages"]["torch"] == torch.__version__
    assert start["python"] == platform.python_version()
    assert start["environment"]["NCCL_DEBUG"] == "WARN"
    assert "hunter2" not in text


def test_the_state_of_a_checkout_is_its_commit_and_what_was_changed_since(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    if git_state(tmp_path) is not None:
        pytest.skip("the temporary folder is inside of a checkout")
    git("init")
    (tmp_path / "recipe.yaml").write_text("lr: 1\n")
    git("add", ".")
    git("commit", "-m", "one")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert (clean["changed"], clean["diff"]) == ([], "")
    (tmp_path / "recipe.yaml").write_text("lr: 2\n")
    (tmp_path / "new.txt").write_text("")
    changed = git_state(tmp_path)
    assert changed["commit"] == clean["commit"]
    assert changed["changed"] == [" M recipe.yaml", "?? new.txt"]
    assert "+lr: 2" in changed["diff"]
