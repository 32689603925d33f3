"""A fault of one rank hangs no other and loses nothing that was trained before."""

import re
from pathlib import Path

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
