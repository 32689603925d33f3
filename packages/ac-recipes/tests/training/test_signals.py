"""A signal is heard at the end of the step; another SIGTERM says nothing new, a second Ctrl-C ends the process."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from ac_recipes.errors import RunInterruptedError
from ac_recipes.invocation import Invocation
from ac_recipes.launch import STOP_FILE
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.saving import Saver
from ac_recipes.training.signals import StopRequest, process_ends_with_run
from ac_recipes.training.trainer import Trainer, train

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def signalled(monkeypatch):
    """The run sends itself a signal in the middle of its third step."""

    def during_the_third_step(signum):
        microbatches = Trainer.microbatches

        def kill(self):
            if self.steps_done == 2:
                os.kill(os.getpid(), signum)
            return microbatches(self)

        monkeypatch.setattr(Trainer, "microbatches", kill)

    return during_the_third_step


@pytest.fixture
def term_before():
    """What SIGTERM does here, given back at the end."""
    before = signal.getsignal(signal.SIGTERM)
    yield before
    signal.signal(signal.SIGTERM, before)


def losses(run):
    return {line["step"]: line["loss"] for line in RunFolder(run).read_metrics() if "loss" in line}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_run_ends_well_and_goes_on_to_the_bit(tiny, trained, signalled, monkeypatch, capsys, signum):  # noqa: PLR0917
    recipe = tiny("step_scheduler.ckpt_every_steps=null")
    with monkeypatch.context():
        signalled(signum)
        stopped = train(recipe, "tiny", invocation=Invocation(("train", "my tiny.yaml", "--json")))
    assert (stopped.steps, stopped.stopped_by) == (3, signum.name)
    assert [c.step for c in whole_checkpoints(stopped.run / "checkpoints")] == [3]
    told = f"stopped by {signum.name} after step 3; go on with: ac-recipes train 'my tiny.yaml' --json --resume "
    assert capsys.readouterr().out.splitlines()[-1] == f"{told}{stopped.run}"
    monkeypatch.undo()
    assert losses(train(recipe, "tiny", resume=stopped.run).run) == losses(trained().run)


def test_a_run_that_is_told_to_end_while_it_saves_makes_no_further_step(tiny, monkeypatch, capsys):
    save = Saver.save

    def told_meanwhile(self, step, validation_loss):
        os.kill(os.getpid(), signal.SIGTERM)
        return save(self, step, validation_loss)

    monkeypatch.setattr(Saver, "save", told_meanwhile)
    stopped = train(tiny(), "tiny")
    assert (stopped.steps, stopped.stopped_by) == (2, "SIGTERM")
    assert [c.step for c in whole_checkpoints(stopped.run / "checkpoints")] == [2]
    assert "stopped by SIGTERM after step 2; go on with: " in capsys.readouterr().out


def test_where_nothing_may_be_saved_the_run_says_so(tiny, signalled):
    signalled(signal.SIGTERM)
    with pytest.raises(RunInterruptedError, match=r"ended by SIGTERM; nothing is saved, as checkpoint\.enabled"):
        train(tiny("checkpoint.enabled=false"), "tiny")


def test_a_second_ctrl_c_does_what_the_first_would_have_done():
    stop = StopRequest()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed(ALONE) is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_sigterm_says_nothing_new(term_before):
    stop = StopRequest()
    with stop.listening():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(ALONE) is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is term_before


@pytest.mark.parametrize("told", [True, False])
def test_a_command_that_was_told_to_stop_hears_no_sigterm_to_its_end(tmp_path, monkeypatch, term_before, told):
    """By the launcher: this process has had no signal of its own."""
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    (tmp_path / "stop").write_text(str(int(signal.SIGTERM) * told))
    stop = StopRequest()
    with process_ends_with_run(), stop.listening():
        stop.agreed(ALONE)
    assert signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if told else term_before)


def test_a_run_that_a_second_ctrl_c_ends_says_what_is_kept_and_how_to_go_on(tiny, monkeypatch):
    microbatches = Trainer.microbatches

    def twice(self):
        for _ in range(2 if self.steps_done == 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return microbatches(self)

    monkeypatch.setattr(Trainer, "microbatches", twice)
    with pytest.raises(RunInterruptedError) as caught:
        train(tiny(), "tiny", invocation=Invocation(("train", "my tiny.yaml")))
    (run,) = Path(tiny().run.dir).iterdir()
    assert caught.value.exit_code == 130
    assert str(caught.value) == (
        f"ended by SIGINT; the newest checkpoint is {run}/checkpoints/step-00000002; go on with: ac-recipes train "
        f"'my tiny.yaml' --resume {run}"
    )


def test_what_the_launcher_left_is_a_request(tmp_path, monkeypatch):
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    stop = StopRequest()
    assert stop.agreed(ALONE) is None
    (tmp_path / "stop").write_text(str(int(signal.SIGTERM)))
    assert stop.agreed(ALONE) is signal.SIGTERM


def test_a_thread_that_cannot_hear_signals_trains_all_the_same(tiny):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tiny("step_scheduler.max_steps=1"), "tiny")))
    thread.start()
    thread.join()
    assert results[0].steps == 1
