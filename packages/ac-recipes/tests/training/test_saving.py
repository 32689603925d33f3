"""Checkpoints of a run: which are kept, what happens when one cannot be written, which one a run goes on from."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ac_recipes.errors import RunError, UsageError
from ac_recipes.invocation import Invocation
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import Trainer, train

INVOCATION = Invocation(("train", "tiny.yaml"))
KEEP = ("checkpoint.keep_last=2", "checkpoint.keep_best=1")
EVERY_STEP = ("step_scheduler.ckpt_every_steps=1", "step_scheduler.val_every_steps=2")


def steps(run):
    return [checkpoint.step for checkpoint in whole_checkpoints(run.checkpoints)]


def losses(run):
    return {line["step"]: line["loss"] for line in run.read_metrics() if "loss" in line}


def flip_a_bit(checkpoint):
    largest = max(checkpoint.path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    return largest


def test_the_last_two_and_the_best_are_kept(tiny, monkeypatch, capsys):
    measured = {0: 9.0, 1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5, 5: 4.0, 6: 5.0}
    monkeypatch.setattr(Trainer, "validate", lambda self: measured[self.steps_done])
    run = RunFolder(train(tiny(*EVERY_STEP, *KEEP), "tiny").run)
    assert {c.step: c.validation_loss for c in whole_checkpoints(run.checkpoints)} == {2: 1.0, 5: 4.0, 6: 5.0}
    logged = {line["step"]: line["validation_loss"] for line in run.read_metrics() if "validation_loss" in line}
    assert logged == measured, "each checkpoint has a loss to be judged by"
    best = f"best checkpoint {run.checkpoints / 'step-00000002'}, validation loss 1.0000"
    assert best in capsys.readouterr().out.splitlines()
    assert len(list(run.checkpoints.iterdir())) == 3


def test_one_that_cannot_be_loaded_is_told_and_the_one_before_is_taken(tiny, monkeypatch, capsys):
    run = RunFolder(train(tiny(*EVERY_STEP, "step_scheduler.max_steps=3"), "tiny").run)
    load = dcp.load

    def lacks_something(state, checkpoint_id):
        if "step-00000003" in str(checkpoint_id):
            raise CheckpointException("load", {0: (RuntimeError("Missing key in checkpoint state_dict: a"), None)})
        load(state, checkpoint_id=checkpoint_id)

    monkeypatch.setattr(dcp, "load", lacks_something)
    train(tiny(*EVERY_STEP, "step_scheduler.max_steps=3"), "tiny", resume=run.path)
    newest, before = (run.checkpoints / f"step-0000000{step}" for step in (3, 2))
    told = f"damaged checkpoint: {newest} cannot be loaded (Missing key in checkpoint state_dict: a); falling back to "
    assert f"{told}the older {before}" in capsys.readouterr().out


def test_the_best_needs_something_held_out(tiny):
    with pytest.raises(UsageError, match=r"checkpoint\.keep_best: needs a validation loss, but no data is held out"):
        train(tiny(*KEEP, "dataset.validation_fraction=0"), "tiny")


def test_a_full_disk_is_told_and_what_was_saved_is_kept(tiny, trained, tmp_path, monkeypatch):
    written = dcp.save

    def full_at_step_4(state, checkpoint_id, **options):
        written(state, checkpoint_id=checkpoint_id, **options)
        if "step-00000004" in str(checkpoint_id):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(checkpoint_id / "__0_0.distcp"))

    recipe = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", full_at_step_4)
        with pytest.raises(RunError) as caught:
            train(tiny(f"run.dir={tmp_path / 'full'}"), "tiny", invocation=INVOCATION)
    (run,) = map(RunFolder, (tmp_path / "full").iterdir())
    assert str(caught.value) == (
        f"{run.checkpoints / 'step-00000004.partial' / '__0_0.distcp'}: No space left on device, while the checkpoint "
        f"of step 4 was written; the newest checkpoint is {run.checkpoints / 'step-00000002'}. Make room, and go on "
        f"with: ac-recipes train tiny.yaml --resume {run.path}"
    )
    assert steps(run) == [2]
    assert not list(run.checkpoints.glob("*.partial")), "what could not be completed does not fill the disk further"
    train(recipe, "tiny", resume=run.path)
    assert steps(run) == [2, 4, 6]
    assert losses(run) == losses(RunFolder(trained().run))


def test_a_write_that_the_system_cuts_off_is_told(tiny, monkeypatch):
    """A real failure in the middle of a file: for the time of the save, no file may have more than 64 KiB."""
    save, (soft, hard) = dcp.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(state, checkpoint_id, **options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
        try:
            save(state, checkpoint_id=checkpoint_id, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(dcp, "save", limited)
    with pytest.raises(RunError) as caught:
        train(tiny(), "tiny")
    assert str(caught.value) == (
        "File too large, while the checkpoint of step 2 was written; no checkpoint was written yet. Raise the limit on "
        "the size of a file (`ulimit -f`, or the file system's own), and "
        "start the run anew"
    )


@pytest.mark.parametrize("then", [None, OSError(errno.EIO, "Input/output error", "data.jsonl")])
@pytest.mark.parametrize("lost", ["", "recipe.yaml"])
def test_a_run_whose_folder_is_gone_ends_and_makes_none_anew(tiny, monkeypatch, lost, then):
    """As it saves, and as it saves what it can after a step that fails."""
    recipe, microbatches = tiny("step_scheduler.ckpt_every_steps=null", "step_scheduler.val_every_steps=null"), []

    def vanish(self):
        if self.steps_done == 3:
            (run,) = Path(recipe.run.dir).iterdir()
            (run / lost).rename(run.parent.parent / "moved")
            if then is not None:
                raise then
        return microbatches[0](self)

    microbatches.append(Trainer.microbatches)
    monkeypatch.setattr(Trainer, "microbatches", vanish)
    monkeypatch.setattr(RunFolder, "write_metrics", lambda *_: None)  # which finds out at the end of the same step
    with pytest.raises(RunError) as caught:
        train(recipe, "tiny")
    assert "the folder of the run was deleted or moved: " in str(caught.value)
    assert str(caught.value).lower().endswith("start the run anew")
    left = [file.name for run in Path(recipe.run.dir).iterdir() for file in run.iterdir()]
    assert "checkpoints" not in left
    assert bool(left) == bool(lost)


def test_a_flipped_bit_is_found_and_the_run_goes_on_from_the_one_before(tiny, capsys):
    run = RunFolder(train(tiny(), "tiny").run)
    expected = losses(run)
    newest = whole_checkpoints(run.checkpoints)[-1]
    damaged = flip_a_bit(newest)
    assert steps(run) == [2, 4, 6], "its files are all there, in their full size"
    train(tiny(), "tiny", resume=run.path)
    told = capsys.readouterr().out
    older = run.checkpoints / "step-00000004"
    assert (
        f"damaged checkpoint: {damaged} is not what was written: its checksum differs from the manifest's; "
        f"falling back to the older {older}" in told
    )
    assert f"resumed from {older}, 4 steps done" in told
    assert losses(run) == expected
    capsys.readouterr()
    train(tiny(), "tiny", resume=run.path)
    assert f"resumed from {newest.path}, 6 steps done" in capsys.readouterr().out, "it was written anew"


def test_where_none_is_sound_every_damage_is_named(tiny):
    run = RunFolder(train(tiny("step_scheduler.max_steps=4"), "tiny").run)
    first, second = whole_checkpoints(run.checkpoints)
    flip_a_bit(first)
    (second.path / ".metadata").unlink()
    with pytest.raises(RunError) as caught:
        train(tiny(), "tiny", resume=run.path)
    assert "holds no sound checkpoint to resume from: " in str(caught.value)
    assert f"{second.path / '.metadata'} cannot be read: No such file or directory" in str(caught.value)
    assert f"{first.path}" in str(caught.value)
    assert "start the run anew" in str(caught.value)
