"""`plan`: block by block, and into the recipe."""

import json
import re

import pytest

from ac_core import Plan
from ac_recipes.load import load_recipe


def test_block_by_block_and_as_json(run, small_arguments):
    code, out, _ = run("plan", *small_arguments, "--budget", "70%", "--device", "cpu")
    assert code == 0
    assert re.match(r"plan for \S+ MiB: peak \S+ MiB", out)
    assert "model.layers.2" in out
    code, out, _ = run("plan", *small_arguments, "--budget", "0.7", "--device", "cpu", "--json")
    assert code == 0
    plan = json.loads(out)
    assert set(plan) == {"budget_bytes", "peak_bytes", "recompute_flops", "blocks"}
    assert plan["peak_bytes"] <= plan["budget_bytes"]
    assert list(plan["blocks"]) == [f"model.layers.{i}" for i in range(3)]


def test_it_is_written_into_the_recipe_and_read_back(run, small_arguments, tmp_path):
    path = tmp_path / "planned.yaml"
    arguments = [*small_arguments, "--budget", "0.7", "--device", "cpu", "--write", str(path)]
    code, out, _ = run("plan", *arguments)
    assert code == 0
    assert out.splitlines()[-1] == f"recipe: {path}"
    text = path.read_text()
    assert text.startswith("# A small Llama")
    assert "hidden_size: 64\n" in text
    config = load_recipe(str(path)).distributed.checkpointing
    assert (config.policy, config.memory_budget) == ("budget", 0.7)
    code, out, _ = run("plan", str(path), "--device", "cpu", "--json")
    assert code == 0
    blocks = json.loads(out)["blocks"]
    assert config.plan == {name: o if isinstance(o, str) else tuple(o) for name, o in blocks.items()}


def test_a_recipe_that_cannot_be_changed_in_place_is_written_anew(run, small_arguments, tmp_path):
    source, path = tmp_path / "aliases.yaml", tmp_path / "planned.yaml"
    run("plan", *small_arguments, "--budget", "0.7", "--device", "cpu", "--write", str(source))
    source.write_text(source.read_text() + "clip_grad_norm: &limit {max_norm: 1.0}\n" + "# &limit *limit\n")
    text = source.read_text().replace("lr: 2.0e-3", "{lr: 2.0e-3}").replace("optimizer:\n  ", "? optimizer\n: ")
    source.write_text(text)
    recipe = load_recipe(str(source))
    code, out, _ = run("plan", str(source), "--device", "cpu", "--write", str(path), "--optimizer.lr=0.5")
    assert code == 0
    written = load_recipe(str(path))
    assert written.optimizer.lr == 0.5
    assert written.distributed == recipe.distributed


def test_what_does_not_fit_is_exit_code_1_with_the_nearest_figure(run, small_arguments):
    code, out, err = run("plan", *small_arguments, "--budget", "1MiB", "--json")
    assert code == 1
    assert "no plan fits into 1.00 MiB. The smallest peak of any is" in err
    assert "no plan fits" in json.loads(out)["error"]


def test_a_picture_is_drawn(run, small_arguments, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Plan, "save_picture", lambda _, path: drawn.append(path), raising=False)
    path = str(tmp_path / "curve.html")
    code, out, _ = run("plan", *small_arguments, "--budget", "1.0", "--picture", path)
    assert code == 0
    assert out.splitlines()[-1] == f"picture: {path}"
    assert drawn == [path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--budget: neither it nor the recipe's memory_budget is given"),
        (["--budget", "lots"], "--budget: 'lots' is not a size such as '24GiB'"),
        (["--budget", "-1"], "--budget: -1 would be bytes"),
        (["--budget", "24GiB", "--write", "/nowhere/x.yaml"], "--write: there is no folder /nowhere"),
        (["--budget", "24GiB", "--write", "."], "--write: . is a folder"),
        (["--budget", "24GiB", "--distributed.strategy", "fsdp3"], "did you mean 'fsdp2'?"),
    ],
)
def test_a_mistake_is_one_line(run, tiny_file, arguments, message):
    code, out, err = run("plan", str(tiny_file), *arguments)
    assert (code, out) == (2, "")
    assert message in err
