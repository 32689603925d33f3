"""A fault of one rank hangs no other and loses nothing that was trained before."""

import re
from pathlib import Path

import pytest

from ac_recipes.training.run_folder import RunFolder

NOISY = (
    "model.config={model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64, resid_pdrop: 0.5}",
    "step_scheduler.max_steps=4",
    "step_scheduler.local_batch_size=1",
)

FAULTS = """
import json, os, re
from pathlib import Path
import torch.distributed as dist
from ac_recipes.errors import RunError
from ac_recipes.reader import read_recipe
from ac_recipes.recipe import Recipe
from ac_recipes.training.trainer import Trainer, train

forward, calls, fault = Trainer.forward, [], None

def spoilt(self, *arguments, **options):
    calls.append(self.steps_done)
    loss = forward(self, *arguments, **options)
    if fault is None or dist.get_rank() == 0 or calls.count(2) != 2:  # in the middle of step 3
        return loss
    if fault == "memory":
        raise MemoryError
    return loss * float("nan")

Trainer.forward = spoilt
((path, resume),) = jobs

def told(spoil=None, resume=None):
    global fault
    fault = spoil
    calls.clear()
    try:
        return str(train(read_recipe(Recipe, Path(path)), "noisy", resume=resume and Path(resume), to_stderr=True).run)
    except RunError as error:
        return f"{type(error).__name__}: {error}"

def run_of(error):
    return re.search(r"the newest checkpoint is (\\S+)/checkpoints/step-00000002", error)[1]

if resume:
    lines = [told(resume=resume)]
else:
    lines = [told(), told("nan")]
    lines.append(told(resume=run_of(lines[-1])))
    lines.append(told("memory"))
    lines.append(run_of(lines[-1]))
if dist.get_rank() == 0:
    print(json.dumps(lines), flush=True)
if resume:
    dist.barrier()
os._exit(0)
"""


def losses(run):
    return [line["loss"] for line in RunFolder(Path(run)).read_metrics() if "loss" in line]


def test_all_ranks_save_the_last_whole_step_and_go_on_to_the_bit(short, train_on_ranks):
    whole, nan, after_nan, memory, failed = train_on_ranks(2, short(*NOISY), script=FAULTS)
    assert re.match(r"RunError: the loss is nan at step 3; the newest checkpoint is \S+/step-00000002\. Try", nan)
    assert re.match(r"LostPeerError: another rank has ended, in step 3, and says why on its node; the newest", memory)
    (after_memory,) = train_on_ranks(2, (short(*NOISY), failed), script=FAULTS)
    assert len(losses(whole)) == 4
    assert losses(after_nan) == losses(after_memory) == losses(whole)


KILL = """
import json, os, re, signal
from pathlib import Path
import torch.distributed as dist
from ac_recipes.errors import RunError
from ac_recipes.reader import read_recipe
from ac_recipes.recipe import Recipe
from ac_recipes.training.trainer import Trainer, train

forward, calls = Trainer.forward, []

def spoilt(self, *arguments, **options):
    calls.append(self.steps_done)
    if dist.get_rank() == VICTIM and calls.count(2) == 2:  # in the middle of step 3
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, *arguments, **options)

((path, _),) = jobs
recipe = read_recipe(Recipe, Path(path))
lines = [str(train(recipe, "noisy", to_stderr=True).run)]
Trainer.forward = spoilt
try:
    train(recipe, "noisy", to_stderr=True)
except RunError as error:
    lines.append(f"{type(error).__name__}: {error}")
print(json.dumps(lines), flush=True)
os._exit(0)
"""

COPIES = ("distributed.dp_size=2", "distributed.dp_replicate_size=2")


@pytest.mark.parametrize(
    ("victim", "settings"),
    [(0, ["distributed.strategy=ddp"]), (1, ["distributed.strategy=ddp"]), (0, COPIES)],
    ids=["ddp, rank 0", "ddp, rank 1", "fsdp2, copies"],
)
def test_who_is_left_by_a_rank_that_is_killed_saves_the_last_whole_step(short, train_on_ranks, victim, settings):
    recipe = short(*NOISY, *settings)
    whole, told = train_on_ranks(2, recipe, script=KILL.replace("VICTIM", str(victim)), killed=victim)
    found = re.fullmatch(
        r"LostPeerError: another rank has ended, in step 3, and says why on its node; the newest checkpoint is "
        r"(\S+)/checkpoints/step-00000002; go on with: ac-recipes train noisy --resume (\S+)",
        told,
    )
    assert found, told
    assert found[1] == found[2]
    (resumed,) = train_on_ranks(2, (recipe, found[1]))
    assert len(losses(whole)) == 4
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize("victim", [0, 2])
def test_of_three_ranks_the_two_that_are_left_both_end(short, train_on_ranks, victim):
    """A collective fails on one of them at once, and on the other when the first has ended."""
    recipe = short(*NOISY, "distributed.strategy=ddp", "step_scheduler.global_batch_size=6")
    _, told = train_on_ranks(3, recipe, script=KILL.replace("VICTIM", str(victim)), killed=victim)
    assert "; the newest checkpoint is " in told
    assert "/checkpoints/step-00000002; go on with: " in told


def test_shares_of_a_run_are_not_saved_without_the_rank_that_is_killed(short, train_on_ranks):
    _, told = train_on_ranks(2, short(*NOISY), script=KILL.replace("VICTIM", "1"), killed=1)
    assert "; no checkpoint was written yet (the steps since could not be saved: each rank held a share of" in told
    assert told.endswith("; start the run anew")


TWICE = """
import json, os, signal
from pathlib import Path
import torch.distributed as dist
import ac_recipes.training.rescue as rescue
from ac_recipes.errors import RunError
from ac_recipes.reader import read_recipe
from ac_recipes.recipe import Recipe
from ac_recipes.training.saving import Saver
from ac_recipes.training.trainer import Trainer, train

forward, calls, save = Trainer.forward, [], Saver.rescue

def spoilt(self, *arguments, **options):
    calls.append(self.steps_done)
    if dist.get_rank() == 0 and calls.count(2) == 2:  # in the middle of step 3
        raise MemoryError
    return forward(self, *arguments, **options)

def no_memory_either(self, *arguments):
    if dist.get_rank() == 1:
        raise MemoryError
    return save(self, *arguments)

Trainer.forward, Saver.rescue = spoilt, no_memory_either
rescue.end_rank = lambda code: os.kill(os.getpid(), signal.SIGKILL)  # as the test expects of rank 1
((path, _),) = jobs
try:
    train(read_recipe(Recipe, Path(path)), "noisy", to_stderr=True)
except RunError as error:
    print(json.dumps([str(error)]), flush=True)
os._exit(0)
"""


def test_a_rank_whose_part_of_the_rescue_fails_keeps_no_other_waiting(short, train_on_ranks):
    (told,) = train_on_ranks(2, short(*NOISY), script=TWICE, killed=1)
    assert re.match(r"out of memory .* in step 3: .*; no checkpoint was written yet \(the steps since could not", told)
