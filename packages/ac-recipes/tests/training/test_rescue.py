"""A step that fails loses nothing that was trained before it."""

import errno
import os
import threading
import weakref
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ac_recipes.errors import RunError
from ac_recipes.invocation import Invocation
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.rescue import LastStep, Rescue, release
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import Trainer, train

QUIET = "step_scheduler.val_every_steps=null"
NOISY = (
    "model.config={model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64, resid_pdrop: 0.5}",
    "step_scheduler.ckpt_every_steps=null",
    QUIET,
)
"""Random numbers in every forward, and no checkpoint but that of the last step and that of a rescue."""


def losses(run):
    return {line["step"]: line["loss"] for line in RunFolder(run).read_metrics() if "loss" in line}


def steps(run):
    return [checkpoint.step for checkpoint in whole_checkpoints(run / "checkpoints")]


def only_run(recipe):
    (run,) = Path(recipe.run.dir).iterdir()
    return run


@pytest.fixture
def fail(monkeypatch):
    """`fail(error)` or `fail(value)`: the second forward of the fourth step raises it, or has it as its loss."""

    def arrange(fault):
        forward, calls = Trainer.forward, []

        def spoilt(self, *arguments, **options):
            loss = forward(self, *arguments, **options)
            calls.append(self.steps_done)
            if calls.count(3) != 2:
                return loss
            if isinstance(fault, Exception):
                raise fault
            return loss * fault

        monkeypatch.setattr(Trainer, "forward", spoilt)

    return arrange


@pytest.mark.parametrize("fault", [float("nan"), MemoryError(), OSError(errno.EIO, "Input/output error", "a.jsonl")])
def test_a_run_goes_on_to_the_bit_after_the_last_whole_step(tiny, trained, fail, monkeypatch, fault):
    recipe = tiny(*NOISY)
    with monkeypatch.context():
        fail(fault)
        with pytest.raises(RunError, match="the newest checkpoint is .*/step-00000003[.;] .*go|plan"):
            train(recipe, "tiny", invocation=Invocation(("train", "tiny.yaml")))
    monkeypatch.undo()
    run = only_run(recipe)
    assert steps(run) == [3]
    train(recipe, "tiny", resume=run)
    assert losses(run) == losses(trained(*NOISY).run)


def test_nothing_is_deleted_for_it(tiny, fail):
    recipe = tiny("checkpoint.keep_last=1", QUIET)
    fail(MemoryError())
    with pytest.raises(RunError, match="step-00000003"):
        train(recipe, "tiny")
    assert steps(only_run(recipe)) == [2, 3]


def test_a_validation_that_fails_loses_nothing(tiny, monkeypatch):
    def no_memory(self):
        if self.steps_done == 3:
            raise MemoryError

    monkeypatch.setattr(Trainer, "validate", no_memory)
    with pytest.raises(RunError, match=r"in the validation after step 3: .*the newest checkpoint is .*step-00000003"):
        train(tiny(), "tiny")


def test_a_step_that_fails_within_its_update_is_not_saved(tiny, monkeypatch):
    step, calls = AdamW.step, []

    def no_memory(self, closure=None):
        calls.append(self)
        if len(calls) == 4:
            raise MemoryError
        return step(self, closure)

    monkeypatch.setattr(AdamW, "step", no_memory)
    with pytest.raises(RunError) as caught:
        train(tiny(), "tiny")
    assert (
        "step-00000002 (the steps since could not be saved: some of the weights have the update of step 4 already, and "
        "others have not). Find what fits with:" in str(caught.value)
    )


def test_weights_that_are_not_finite_are_not_saved(tiny, monkeypatch):
    step = Trainer.step

    def spoil(self):
        figures = step(self)
        if self.steps_done == 3:
            next(iter(self.model.parameters())).data.fill_(float("nan"))
        return figures

    monkeypatch.setattr(Trainer, "step", spoil)
    with pytest.raises(RunError, match=r"step-00000002 \(the steps since .*embed_tokens.weight is not finite since"):
        train(tiny(), "tiny")


def test_where_nothing_may_be_saved_the_run_says_so(tiny, fail):
    fail(float("nan"))
    with pytest.raises(RunError, match=r"no checkpoint .* yet \(the steps since .*: checkpoint\.enabled is false\)"):
        train(tiny("checkpoint.enabled=false", QUIET), "tiny")


def test_a_disk_that_is_full_then_is_the_reason(tiny, fail, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fail(float("nan"))
    monkeypatch.setattr(torch.distributed.checkpoint, "save", full)
    with pytest.raises(RunError, match=r"^the loss is nan at step 4; .*could not be saved: No space left on device"):
        train(tiny("step_scheduler.ckpt_every_steps=null", QUIET), "tiny")


def test_buffers_are_those_from_before_the_step_and_the_rest_is_as_it_is():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    optimizer = AdamW(model.parameters())
    last = LastStep(model, optimizer)

    def forward_and_backward():
        last.begin()
        model(torch.randn(8, 3)).sum().backward()

    for _ in range(2):  # references are taken in the first
        forward_and_backward()
        with last.updating():
            optimizer.step()
            optimizer.zero_grad()
    before = deepcopy(model.state_dict())
    forward_and_backward()
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert last.has_buffers
    torch.testing.assert_close(last.state.model, before, rtol=0, atol=0)
    assert all(torch.equal(value["step"], torch.tensor(2.0)) for value in last.state.optimizer["state"].values())


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_saves_a_model_with_buffers_alone(rank):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer, saved = AdamW(model.parameters()), []
    trainer = SimpleNamespace(last=LastStep(model, optimizer), steps_done=1)
    model(torch.randn(8, 3)).sum().backward()
    with trainer.last.updating():
        optimizer.step()
    saver = SimpleNamespace(rescue_alone=lambda step, state: saved.append((step, state)))
    why_not = Rescue(Ranks(rank, 1, torch.device("cpu")), saver, SimpleNamespace(), trainer)._saved_alone()
    assert [step for step, _ in saved] == ([1] if rank == 0 else [])
    assert why_not == (None if rank == 0 else "the buffers that count are those of rank 0, which is gone")


def test_optimizer_state_that_is_made_in_a_later_step_is_part_of_it():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "later": nn.Linear(2, 2)})
    optimizer = AdamW(model.parameters())
    last = LastStep(model, optimizer)
    for used in ("first", "later", "later"):
        last.begin()
        model[used](torch.ones(1, 2)).sum().backward()
        with last.updating():
            optimizer.step()
            optimizer.zero_grad()
    assert last.state.optimizer["state"].keys() == dict(model.named_parameters()).keys()
    assert last.state.optimizer["state"]["later.weight"]["step"] == 2


def test_no_update_begins_while_the_weights_are_being_written():
    model = nn.Linear(2, 2)
    last = LastStep(model, AdamW(model.parameters()))
    begun = threading.Event()

    def update():
        with last.updating():
            begun.set()

    thread = threading.Thread(target=update)
    with last.still():
        thread.start()
        assert not begun.wait(0.2)
        assert not last.is_updating
    thread.join(10)
    assert begun.is_set()


def test_a_disk_that_is_full_after_memory_ran_out_is_why_nothing_was_saved(tiny, fail, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    fail(MemoryError())
    monkeypatch.setattr(torch.distributed.checkpoint, "save", full)
    with pytest.raises(RunError) as caught:
        train(tiny("step_scheduler.ckpt_every_steps=null", QUIET), "tiny")
    told = str(caught.value)
    assert ", in step 4: MemoryError; no checkpoint was written yet (the steps since could not be saved: File" in told
    assert told.count("Find what fits with") == 1


def test_the_tensors_of_a_failed_call_are_freed():
    seen = []

    def step():
        activations = torch.zeros(3)
        seen.append(weakref.ref(activations))
        raise MemoryError

    try:
        step()
    except MemoryError as error:
        assert seen[0]() is not None
        release(error)
    assert seen[0]() is None
