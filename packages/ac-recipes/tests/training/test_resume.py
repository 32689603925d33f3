"""What a run that was stopped, or failed, had still to do at its step, the run that goes on does first."""

import errno
import os
import signal
from pathlib import Path

import pytest

from ac_recipes.errors import RunError
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import Trainer, train

NO_CHECKPOINTS = "step_scheduler.ckpt_every_steps=null"


def lines(run, what):
    return [(line["step"], line[what]) for line in RunFolder(run).read_metrics() if what in line]


def saved(run):
    return {checkpoint.step: checkpoint.validation_loss for checkpoint in whole_checkpoints(run / "checkpoints")}


@pytest.fixture
def broken(tiny, monkeypatch):
    """`broken("validate" or "step", steps done, ...)`: the folder of a run that has failed there."""

    def run(method, at, *settings):
        works = getattr(Trainer, method)

        def fail(self):
            if self.steps_done == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO), "shard.bin")
            return works(self)

        recipe = tiny(*settings)
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, method, fail)
            with pytest.raises(RunError, match=r"shard\.bin: Input/output error"):
                train(recipe, "tiny")
        return RunFolder.newest(Path(recipe.run.dir), "tiny").path

    return run


@pytest.fixture
def stopped(tiny, monkeypatch):
    """`stopped(steps done, ...)`: the folder of a run that was sent SIGTERM in its next step."""

    def run(at, *settings):
        batches = Trainer.microbatches

        def kill(self):
            if self.steps_done == at:
                os.kill(os.getpid(), signal.SIGTERM)
            return batches(self)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "microbatches", kill)
            return train(tiny(*settings), "tiny").run

    return run


@pytest.mark.parametrize("at", [3, 6])
def test_a_validation_that_failed_is_made_by_the_run_that_goes_on(tiny, trained, broken, at):
    run = broken("validate", at)
    assert saved(run)[at] is None
    whole = trained().run
    result = train(tiny(), "tiny", resume=run)
    assert lines(run, "validation_loss") == lines(whole, "validation_loss")
    assert lines(run, "loss") == lines(whole, "loss")
    assert result.validation_loss == saved(run)[6] == saved(whole)[6]
    if at == 3:
        assert saved(run)[3] == dict(lines(whole, "validation_loss"))[3]


def test_a_validation_due_when_a_run_is_stopped_is_made_by_the_run_that_goes_on(tiny, trained, stopped):
    run = stopped(2, NO_CHECKPOINTS)
    assert saved(run) == {3: None}
    train(tiny(NO_CHECKPOINTS), "tiny", resume=run)
    whole = trained().run
    assert lines(run, "validation_loss") == lines(whole, "validation_loss")
    assert lines(run, "loss") == lines(whole, "loss")
    assert saved(run)[3] == dict(lines(whole, "validation_loss"))[3]


def test_the_best_is_kept_although_the_run_was_stopped_before_it_was_judged(tiny, stopped, monkeypatch):
    measured = {0: 9.0, 2: 5.0, 3: 1.0, 4: 2.0, 6: 3.0}
    monkeypatch.setattr(Trainer, "validate", lambda self: measured[self.steps_done])
    keep = ("step_scheduler.val_every_steps=null", "checkpoint.keep_last=1", "checkpoint.keep_best=1")
    run = stopped(2, *keep)
    assert saved(run)[3] is None
    train(tiny(*keep), "tiny", resume=run)
    assert saved(run) == {3: 1.0, 6: 3.0}


def test_one_that_was_measured_and_not_saved_with_the_step_is_not_measured_again(tiny, trained, broken, monkeypatch):
    run = broken("step", 3, NO_CHECKPOINTS)
    assert saved(run) == {3: None}
    judged, validate = [], Trainer.validate
    monkeypatch.setattr(Trainer, "validate", lambda self: judged.append(self.steps_done) or validate(self))
    train(tiny(NO_CHECKPOINTS), "tiny", resume=run)
    assert judged == [6]
    assert list(saved(run).items()) == lines(trained().run, "validation_loss")[1:]
