"""`train`: what its arguments mean together."""

import json
import shutil


def test_a_run_to_be_resumed_brings_its_recipe(run, trained, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(trained().run, folder)
    code, out, err = run(
        "train", "--resume", str(folder), "--step_scheduler.max_steps=7", "--run.dir", str(tmp_path / "other")
    )
    assert (code, err) == (0, "")
    assert f"done: 7 steps | run folder {folder}" in out
    changed = [line for line in out.splitlines() if line.startswith("changed since")]
    assert changed == ["changed since the run was last started: step_scheduler.max_steps: 6 -> 7"]
    *_, session = map(json.loads, (folder / "sessions.jsonl").read_text().splitlines())
    assert session["command"][:5] == ["ac-recipes", "train", str(folder / "recipe.yaml"), "--resume", str(folder)]
    assert not (tmp_path / "other").exists()
