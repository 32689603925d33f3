"""The newest and the best stay; what goes is never taken for a damaged checkpoint."""

import pytest

from ac_recipes.training import retention
from ac_recipes.training.checkpoint import discard_partial, found_checkpoints, judge, whole_checkpoints
from ac_recipes.training.config import CheckpointConfig
from ac_recipes.training.manifest import Checkpoint, record_files, write_manifest

LOSSES = {1: 3.0, 2: 1.0, 3: None, 4: 1.0, 5: 2.0, 6: 2.5}


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "left"),
    [
        (None, 0, [1, 2, 3, 4, 5, 6]),
        (1, 0, [6]),
        (2, 1, [4, 5, 6]),
        (2, 2, [2, 4, 5, 6]),
        (1, 3, [2, 4, 5, 6]),
        (9, 9, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, keep_last, keep_best, left):
    checkpoints = [Checkpoint(tmp_path / str(step), step, 1, loss, {}) for step, loss in LOSSES.items()]
    config = CheckpointConfig(keep_last=keep_last, keep_best=keep_best)
    gone = {checkpoint.step for checkpoint in retention.superseded(checkpoints[::-1], config)}
    assert sorted(set(LOSSES) - gone) == left


def test_a_loss_that_is_not_finite_is_not_among_the_best(tmp_path):
    losses = (float("nan"), 1.0, float("nan"), 0.9, float("inf"))
    checkpoints = [Checkpoint(tmp_path / str(step), step, 1, loss, {}) for step, loss in enumerate(losses)]
    assert [checkpoint.step for checkpoint in retention.best(checkpoints, 3)] == [3, 1]


def test_a_deletion_that_is_interrupted_leaves_nothing_that_looks_damaged(tmp_path, monkeypatch):
    names = [f"step-0000000{step}" for step in (1, 2)]
    for step, name in enumerate(names, 1):
        path = tmp_path / name
        path.mkdir()
        (path / ".metadata").touch()
        write_manifest(Checkpoint(path, step, 1, None, record_files(path)), path)

    def killed(path):
        (path / ".metadata").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(retention.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            retention.remove(whole_checkpoints(tmp_path)[0])
    assert [found.path.name for found in found_checkpoints(tmp_path)] == names[1:]
    discard_partial(tmp_path)  # as the next save does
    assert [path.name for path in tmp_path.iterdir()] == names[1:]


def test_a_manifest_that_cannot_be_written_anew_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "step-00000003"
    path.mkdir()
    (path / ".metadata").touch()
    checkpoint = Checkpoint(path, 3, 1, None, record_files(path))
    write_manifest(checkpoint, path)

    def full(_manifest, file, **_options):
        file.write("{")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ac_recipes.training.manifest.json.dump", full)
        with pytest.raises(OSError, match="No space left"):
            judge(checkpoint, 1.5)
    assert whole_checkpoints(tmp_path) == [checkpoint]
    judge(checkpoint, 1.5)
    assert [found.validation_loss for found in whole_checkpoints(tmp_path)] == [1.5]
    assert {file.name for file in path.iterdir()} == {".metadata", "manifest.json"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep_last": 0}, "keep_last: 0 is below 1"),
        ({"keep_last": 1, "keep_best": -1}, "keep_best: -1 is below 0"),
        ({"keep_best": 1}, "keep_best: 1 has no effect while keep_last is null"),
    ],
)
def test_what_would_keep_nothing_or_do_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**fields)
