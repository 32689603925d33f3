"""No figure of a run is lost where the disk is full for a while, or for good."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from ac_recipes.errors import RankError
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import Trainer, train


@pytest.fixture
def full_in(monkeypatch):
    """`full_in(steps)`: the disk has no room for lines while the newest is of one of `steps`."""

    def arrange(steps):
        write = RunFolder.write_metrics

        def limited(self, *lines):
            if lines[-1]["step"] in steps:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.metrics))
            write(self, *lines)

        monkeypatch.setattr(RunFolder, "write_metrics", limited)

    return arrange


@pytest.mark.parametrize(("loss", "written"), [("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")])
def test_a_validation_loss_that_is_not_finite_is_told_and_written_as_json(tiny, monkeypatch, capsys, loss, written):
    monkeypatch.setattr(Trainer, "validate", lambda _: float(loss))
    recipe = tiny("checkpoint.keep_last=1", "checkpoint.keep_best=1", "step_scheduler.max_steps=2")
    result = train(recipe, "tiny")
    out = capsys.readouterr().out
    assert all(f"warning: the validation loss after step {step} is {loss}, although " in out for step in (0, 2))
    manifest, metrics = result.run / "checkpoints" / "step-00000002" / "manifest.json", result.run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    texts = [json.dumps(result.to_dict(), allow_nan=False), manifest.read_text(), *lines]
    read = [json.loads(text, parse_constant=pytest.fail) for text in texts]
    found = [values["validation_loss"] for values in read if "validation_loss" in values]
    assert found == [written] * 4
    metrics.write_text(metrics.read_text().replace(f'"{written}"', written))  # as Python writes it, and others may
    train(recipe, "tiny", resume=result.run)
    assert metrics.read_text().splitlines() == lines, "the loss is known, and not measured again"
    assert "best checkpoint" not in out + capsys.readouterr().out


SAVED_LATE = ("step_scheduler.val_every_steps=null", "step_scheduler.ckpt_every_steps=5")


def test_lines_are_written_with_the_next_that_can_be(tiny, full_in, capsys):
    full_in({2, 3})
    run = train(tiny(*SAVED_LATE), "tiny").run
    losses = [line["step"] for line in RunFolder(run).read_metrics() if "loss" in line]
    assert losses == [1, 2, 3, 4, 5, 6]
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(str(run / "metrics.jsonl"))]
    assert told.endswith(
        "metrics.jsonl: No space left on device; the figures from step 2 on are kept, and written when they can be, at "
        "the latest before the next checkpoint"
    )


def test_a_run_ends_before_it_saves_what_has_no_figures_and_prints_those(tiny, full_in, capsys):
    full_in(range(4, 100))
    with pytest.raises(RankError) as caught:
        train(tiny(*SAVED_LATE), "tiny")
    (run,) = Path(tiny().run.dir).iterdir()
    assert re.search(r"metrics.jsonl: No space left on device, in step 5; .*Make room, and", str(caught.value))
    assert [c.step for c in whole_checkpoints(run / "checkpoints")] == [5]  # by the rescue
    begins = f"not in {run / 'metrics.jsonl'}: "
    told = [line.removeprefix(begins) for line in capsys.readouterr().out.splitlines() if line.startswith(begins)]
    assert [json.loads(line)["step"] for line in told] == [4, 5]
    assert [line["step"] for line in RunFolder(run).read_metrics()] == [0, 1, 2, 3]
