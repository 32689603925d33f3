"""The folder of a run survives a kill at any point of its writing."""

import resource
import signal
from contextlib import contextmanager

import pytest

from ac_recipes.errors import RunError
from ac_recipes.reader import read_recipe
from ac_recipes.recipe import Recipe
from ac_recipes.training.manifest import Checkpoint, record_files, write_manifest
from ac_recipes.training.run_folder import RunFolder


def test_it_keeps_the_resolved_recipe(tmp_path, tiny):
    recipe = tiny("optimizer.lr=1e-4")
    run = RunFolder.create(tmp_path, "tiny", recipe)
    assert read_recipe(Recipe, run.recipe) == recipe


def test_two_runs_in_one_second_get_two_folders(tmp_path, tiny):
    runs = {RunFolder.create(tmp_path, "tiny", tiny()).path for _ in range(3)}
    assert len(runs) == 3


def test_metrics_after_a_checkpoint_are_dropped_and_a_cut_line_ignored(tmp_path, tiny):
    run = RunFolder.create(tmp_path, "tiny", tiny())
    for step in range(1, 5):
        run.write_metrics({"step": step, "loss": 1 / step})
    with run.metrics.open("a") as file:
        file.write('{"step": 5, "lo')
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4]
    run.drop_metrics_after(2)
    run.write_metrics({"step": 3, "loss": 0.3})
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3]


def test_lines_of_metrics_are_written_all_or_none(tmp_path, tiny):
    run = RunFolder.create(tmp_path, "tiny", tiny())
    run.write_metrics({"step": 1, "loss": 1.0})
    before = run.metrics.read_bytes()
    room = len(before) + 30  # for one line and a part of the next
    with files_of_at_most(room), pytest.raises(OSError, match="File too large"):
        run.write_metrics({"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.25})
    assert run.metrics.read_bytes() == before


@contextmanager
def files_of_at_most(size):
    handler, (soft, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_folder_whose_recipe_cannot_be_written_is_not_left(tmp_path, tiny):
    recipe = tiny()
    with files_of_at_most(1), pytest.raises(OSError, match=r"File too large: '.*/recipe\.yaml'"):
        RunFolder.create(tmp_path / "runs", "tiny", recipe)
    assert not list((tmp_path / "runs").iterdir())


def test_a_link_to_nowhere_and_a_file_are_no_runs(tmp_path):
    (tmp_path / "tiny-20990101-000000").symlink_to(tmp_path / "gone")
    (tmp_path / "tiny-20990101-000001").touch()
    assert RunFolder.newest(tmp_path, "tiny") is None


@pytest.mark.parametrize("gone", ["", "recipe.yaml"])
def test_no_line_is_written_where_the_run_is_gone(tmp_path, tiny, gone):
    run = RunFolder.create(tmp_path, "tiny", tiny())
    run.write_metrics({"step": 1})
    (run.path / gone).rename(tmp_path / "moved")
    with pytest.raises(RunError, match=r"the folder of the run was deleted or moved: .*/recipe\.yaml is gone"):
        run.write_metrics({"step": 2})
    assert len(run.read_metrics()) == (1 if gone else 0)


def test_the_newest_is_the_newest_with_a_whole_checkpoint(tmp_path, tiny):
    RunFolder.create(tmp_path, "tiny", tiny())
    assert RunFolder.newest(tmp_path, "tiny") is None


@pytest.mark.parametrize("name", ["tiny", "my[1]"])
def test_a_run_of_another_recipe_is_not_taken_for_this_one(tmp_path, tiny, name):
    for other in (f"{name}-2", name, f"{name}x"):
        run = RunFolder.create(tmp_path, other, tiny())
        folder = run.checkpoints / "step-00000002"
        folder.mkdir(parents=True)
        (folder / ".metadata").write_text("x")
        write_manifest(Checkpoint(folder, 2, 1, None, record_files(folder)), folder)
    found = RunFolder.newest(tmp_path, name)
    assert found.path.name.rsplit("-", 2)[0] == name
