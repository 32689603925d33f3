"""Megatron-FSDP's own wrapper, run on the CPU: its streams, all that it needs a GPU for here, do nothing."""

from importlib.util import find_spec

import pytest

from ac_recipes.errors import UsageError
from ac_recipes.training.preflight import preflight
from ac_recipes.training.resume import find_run
from ac_recipes.training.trainer import train

WITHOUT_A_GPU = """
import sys
from contextlib import nullcontext
from unittest import mock

import torch
import transformers.generation.utils  # its annotations name what is replaced below
from megatron.core.distributed.fsdp.src import megatron_fsdp  # the package, in the copy that Megatron-core carries

import ac_recipes.parallel.megatron as ours

sys.modules["megatron_fsdp"] = megatron_fsdp
ours.check_machine = lambda: None
stream = mock.MagicMock()
for name in ("Stream", "Event", "current_stream"):
    setattr(torch.cuda, name, lambda *_, **__: stream)
torch.cuda.current_device = lambda: 0
torch.cuda.stream = lambda _: nullcontext()
torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
torch.Tensor.cuda = lambda self, *_, **__: self
"""


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_two_ranks_train_as_one_process(short, train_on_ranks, assert_steps_alike):
    alone = train(short(), "alone").run
    megatron = short("distributed.strategy=megatron_fsdp", "checkpoint.enabled=false")
    (run,) = train_on_ranks(2, megatron, prelude=WITHOUT_A_GPU)
    assert_steps_alike(run, alone, "Megatron-FSDP")
    with pytest.raises(UsageError, match="--resume: with strategy 'megatron_fsdp' the optimizer's state is not"):
        find_run(megatron, "alone", str(alone))


def test_checkpoints_that_could_not_be_resumed_from_are_refused_before_anything_is_built(short, monkeypatch):
    monkeypatch.setattr("ac_recipes.parallel.megatron.check_machine", lambda: None)
    megatron = "distributed.strategy=megatron_fsdp"
    with pytest.raises(UsageError, match=r"^checkpoint\.enabled: with strategy 'megatron_fsdp' .* to false,"):
        preflight(short(megatron), 2)
    preflight(short(megatron, "checkpoint.enabled=false"), 2)
    preflight(short(megatron), 1)
