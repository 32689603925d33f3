"""`plan`: block by block, and into the recipe."""

import errno
import json
import os

import pytest
import torch

import ac_core
from ac_core import BudgetError, Plan
from ac_core.advice import Advice
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
    assert load_recipe(str(path)).distributed.checkpointing.plan == planned.blocks


def test_a_recipe_that_cannot_be_changed_in_place_is_written_anew(run, tiny_file, tmp_path, planned):
    text = tiny_file.read_text().replace("lr_warmup_steps: 2", "lr_warmup_steps: &few 2")
    tiny_file.write_text(text.replace("ckpt_every_steps: 2", "ckpt_every_steps: *few"))
    path = tmp_path / "planned.yaml"
    code, out, _ = run("plan", str(tiny_file), "--budget", "0.7", "--write", str(path), "--optimizer.lr=0.5")
    assert code == 0
    assert "every setting written out" in out
    written = load_recipe(str(path))
    assert written.optimizer.lr == 0.5
    assert written.distributed.checkpointing.plan == planned.blocks


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
    assert load_recipe(str(path)).distributed.checkpointing.plan == planned.blocks
    assert path.read_text().endswith("# mine\n") == (named == "recipe")  # comments of the recipe are kept


def test_a_file_that_appears_while_the_plan_is_made_is_kept(run, tiny_file, tmp_path, planned, monkeypatch):
    path = tmp_path / "planned.yaml"

    def while_somebody_writes(*_arguments, **_options):
        path.write_text("mine")
        return planned

    monkeypatch.setattr(planning, "make_plan", while_somebody_writes)
    arguments = ["plan", str(tiny_file), "--budget", "0.7", "--write", str(path)]
    code, _, err = run(*arguments)
    assert code == 1
    assert f"ac-recipes: --write: {path} has appeared while the plan was made, and is left as it is; give" in err
    assert path.read_text() == "mine"
    assert run(*arguments, "--overwrite")[0] == 0
    assert load_recipe(str(path)).distributed.checkpointing.plan == planned.blocks


def test_a_plan_that_cannot_be_written_leaves_nothing(run, tiny_file, tmp_path, planned, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "new" / "planned.yaml"
    path.parent.mkdir()
    monkeypatch.setattr(planning, "make_plan", lambda *_arguments, **_options: planned)
    monkeypatch.setattr(os, "replace", full)
    code, _, err = run("plan", str(tiny_file), "--budget", "0.7", "--write", str(path))
    assert code == 1
    assert err.endswith(f"ac-recipes: --write: cannot write {path}: No space left on device\n")
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(("verb", "flag"), [("plan", "--picture"), ("estimate", "--picture"), ("compare", "--report")])
def test_no_command_writes_over_a_file_unasked(run, tiny_file, tmp_path, verb, flag):
    path = tmp_path / "mine.html"
    path.symlink_to("nowhere")  # it is somebody's, although nothing is behind it
    code, out, err = run(verb, str(tiny_file), flag, str(path))
    assert (code, out) == (2, "")
    assert err == f"ac-recipes: {flag}: {path} is there already; give another name, or --overwrite\n"


def test_what_does_not_fit_is_exit_code_2_with_the_nearest_figure(run, small_arguments, tmp_path):
    path = tmp_path / "planned.yaml"
    code, out, err = run("plan", *small_arguments, "--budget", "1MiB", "--json", "--write", str(path))
    assert code == 2
    assert "ac-recipes: --budget: no plan fits into 1.00 MiB (1.05 MB). The smallest peak of any is" in err
    assert "no plan fits" in json.loads(out)["error"]
    assert not path.exists()


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_budget_of_the_recipe_that_nothing_fits_is_exit_code_2(run, tiny_file, verb, monkeypatch):
    def plan(**_):
        raise BudgetError(Advice(("memory_budget: no plan fits into 2.00 KiB",)))

    monkeypatch.setattr(ac_core, "plan", plan)
    field = "distributed.activation_checkpointing"
    code, out, err = run(verb, str(tiny_file), f"--{field}={{policy: budget, memory_budget: 2KiB}}")
    assert (code, out) == (2, "")
    assert f"ac-recipes: {field}.memory_budget: no plan fits into 2.00 KiB" in err
    assert not (tiny_file.parent / "runs").exists()


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
        (["--budget", "24GiB", "--write", "/nowhere/x.yaml"], "--write: there is no folder /nowhere"),
        (["--budget", "24GiB", "--write", ""], "--write: the name of the file is empty, as an unset variable leaves"),
        (["--budget", "24GiB", "--write", "."], "--write: . is a folder"),
        (["--budget", "24GiB", "--distributed.strategy", "fsdp3"], "did you mean 'fsdp2'?"),
    ],
)
def test_a_mistake_is_one_line(run, tiny_file, arguments, message):
    code, out, err = run("plan", str(tiny_file), *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("verb", ["plan", "estimate", "compare"])
@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("24", "24 would be bytes, too few for any model; give a unit: '24GiB'"),
        ("0", "0 would be bytes, too few for any model; give a size such as '24GiB' or '24GB', "),
        ("-1", "-1 would be bytes, too few for any model; give a size such as '24GiB' or '24GB', "),
        ("abc", "'abc' is not a size such as '24GiB'"),
        ("24G", "'24G' has no unit of memory: B, KiB, MiB, GiB, TiB, KB, MB, GB, TB; did you mean 24GiB?"),
        ("150%", "'150%' is no share above 0% and up to 100% of what no checkpointing takes"),
    ],
)
def test_what_is_no_budget_is_told_before_anything_is_read(run, verb, budget, message):
    code, out, err = run(verb, "no-such-recipe", "--budget", budget)
    assert (code, out) == (2, "")
    assert err.startswith(f"ac-recipes: --budget: {message}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("verb", ["plan", "estimate", "compare", "train"])
def test_a_budget_of_the_device_is_refused_before_any_step_where_there_is_none(run, tiny_file, verb, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for work in ("plan", "estimate", "measure"):
        monkeypatch.setattr(ac_core, work, lambda *_, **__: pytest.fail("a step was simulated"))
    if verb == "train":
        named = "distributed.activation_checkpointing.memory_budget"
        arguments = ["--distributed.activation_checkpointing={policy: budget, memory_budget: device}"]
    else:
        named, arguments = "--budget", ["--budget", "device"]
    code, out, err = run(verb, str(tiny_file), *arguments)
    assert (code, out) == (2, "")
    assert f"ac-recipes: {named}: 'device' is what the GPU has, and there is none here; give a size" in err
