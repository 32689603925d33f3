"""`plan`: block by block, and into the recipe."""

import json

import pytest

from ac_core import Plan
from ac_recipes.analysis import planning
from ac_recipes.load import load_recipe


@pytest.fixture
def planned(small_plan, monkeypatch):
    """Every plan is that for the small recipe."""
    monkeypatch.setattr(planning, "make_plan", lambda *_, **__: small_plan)
    return small_plan


def test_block_by_block(run, small_arguments, planned):
    code, out, _ = run("plan", *small_arguments, "--budget", "0.7", "--device", "cpu")
    assert code == 0
    assert out.startswith(str(planned))
    assert "predicted for 4 x 128 tokens a rank, float32, one process, fused loss, adamw, cpu with plain kernels" in out


def test_that_figures_are_those_of_uncompiled_blocks_is_told_where_the_recipe_compiles(run, small_arguments, planned):
    code, out, _ = run("plan", *small_arguments, "--budget", "0.7", "--device", "cpu", "--compile", "true")
    assert code == 0
    assert out.splitlines()[-1].startswith("compile: the recipe compiles its blocks, and this command does not: ")


def test_as_json(run, small_arguments, planned):
    code, out, _ = run("plan", *small_arguments, "--budget", "70%", "--device", "cpu", "--json")
    assert code == 0
    plan = json.loads(out)
    assert set(plan) == {"budget_bytes", "peak_bytes", "recompute_flops", "blocks"}
    assert plan["peak_bytes"] == planned.peak_bytes <= plan["budget_bytes"]
    assert list(plan["blocks"]) == [f"model.layers.{i}" for i in range(3)]


def test_it_is_written_into_the_recipe_and_read_back(run, small_arguments, tmp_path, planned):
    path = tmp_path / "planned.yaml"
    code, out, _ = run("plan", *small_arguments, "--budget", "0.7", "--write", str(path))
    assert code == 0
    assert out.splitlines()[-1] == f"recipe: {path}"
    assert path.read_text().startswith("# A small Llama")
    assert "hidden_size: 64\n" in path.read_text()
    assert load_recipe(str(path)).distributed.checkpointing == planned.to_config()


def test_a_recipe_that_cannot_be_changed_in_place_is_written_anew(run, tiny_file, tmp_path, planned):
    text = tiny_file.read_text().replace("lr_warmup_steps: 2", "lr_warmup_steps: &few 2")
    tiny_file.write_text(text.replace("ckpt_every_steps: 2", "ckpt_every_steps: *few"))
    path = tmp_path / "planned.yaml"
    code, out, _ = run("plan", str(tiny_file), "--budget", "0.7", "--write", str(path), "--optimizer.lr=0.5")
    assert code == 0
    assert "every setting written out" in out
    written = load_recipe(str(path))
    assert written.optimizer.lr == 0.5
    assert written.distributed.checkpointing == planned.to_config()


@pytest.mark.parametrize("named", ["recipe", "another"])
def test_a_file_that_is_there_is_kept_unless_it_may_be_overwritten(run, tiny_file, tmp_path, planned, named):
    path = tiny_file if named == "recipe" else tmp_path / "notes.yaml"
    path.write_text(kept := tiny_file.read_text() + "# mine\n")
    arguments = ["plan", str(tiny_file), "--budget", "0.7", "--write", str(path)]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err == f"ac-recipes: --write: {path} is there already; give another name, or --overwrite\n"  # nothing began
    assert path.read_text() == kept
    assert run(*arguments, "--overwrite")[0] == 0
    assert load_recipe(str(path)).distributed.checkpointing == planned.to_config()
    assert path.read_text().endswith("# mine\n") == (named == "recipe")  # comments of the recipe are kept


@pytest.mark.parametrize(("verb", "flag"), [("plan", "--picture"), ("estimate", "--picture"), ("compare", "--report")])
def test_no_command_writes_over_a_file_unasked(run, tiny_file, tmp_path, verb, flag):
    path = tmp_path / "mine.html"
    path.symlink_to("nowhere")  # it is somebody's, although nothing is behind it
    code, out, err = run(verb, str(tiny_file), flag, str(path))
    assert (code, out) == (2, "")
    assert err == f"ac-recipes: {flag}: {path} is there already; give another name, or --overwrite\n"


def test_what_does_not_fit_is_exit_code_1_with_the_nearest_figure(run, small_arguments):
    code, out, err = run("plan", *small_arguments, "--budget", "1MiB", "--json")
    assert code == 1
    assert "no plan fits into 1.00 MiB (1.05 MB). The smallest peak of any is" in err
    assert "no plan fits" in json.loads(out)["error"]


def test_a_picture_is_drawn(run, small_arguments, tmp_path, monkeypatch, planned):
    drawn = []
    monkeypatch.setattr(Plan, "save_picture", lambda _, path: drawn.append(path), raising=False)
    path = str(tmp_path / "curve.html")
    code, out, _ = run("plan", *small_arguments, "--budget", "0.7", "--picture", path)
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
