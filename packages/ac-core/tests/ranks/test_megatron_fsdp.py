"""Megatron-FSDP's own wrapper, run on the CPU: `full` is applied there, before or after the model is wrapped.

It takes a GPU for granted. Its streams are all that it needs one for with small models, so they are replaced by ones
that do nothing while it runs here: every collective, hook and exchange of parameters is its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from ac_core_decoder import VOCABULARY, Decoder, Layer
from torch import Tensor
from torch.distributed import init_device_mesh

from ac_core import MegatronFSDPConfig, apply_activation_checkpointing

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")


@contextmanager
def streams_that_do_nothing() -> Iterator[None]:
    stream = mock.MagicMock()
    replaced = {
        "current_device": lambda: 0,
        "Stream": lambda *_, **__: stream,
        "Event": lambda *_, **__: stream,
        "current_stream": lambda *_: stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **replaced))
        stack.enter_context(mock.patch.object(Tensor, "cuda", lambda self, *_, **__: self))
        yield


def train(rank: int) -> dict[str, tuple[bool, int]]:
    """For no checkpointing and `full`, applied before or after: whether the numbers of three steps are those without;
    how often the first block's MLP ran."""
    results, expected = {}, None
    with streams_that_do_nothing():
        for name in ("none", "before", "after"):
            numbers, runs = _steps(rank, name)
            expected = expected or numbers
            results[name] = len(numbers) == len(expected) and all(map(torch.equal, numbers, expected)), runs
    return results


def _steps(rank: int, when: str) -> tuple[list[Tensor], int]:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard

    config = MegatronFSDPConfig(activation_checkpointing=when != "none").checkpointing
    model = Decoder(depth=2)
    runs = []
    model.layers[0].mlp.up.register_forward_hook(lambda *_: runs.append(1))
    if when == "before":
        apply_activation_checkpointing(model, config)
    model, optimizer = fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)),
        dp_shard_dim="shard",
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=3,
        device=torch.device("cpu"),
        sync_model_each_microbatch=True,
        calculate_per_token_loss=True,  # sums over ranks: gloo does not know the other way
    )
    if when == "after":
        apply_activation_checkpointing(model, config)
    torch.manual_seed(rank)
    numbers = []
    for _ in range(3):
        loss = model(*torch.randint(VOCABULARY, (2, 2, 8)))
        loss.backward()
        numbers += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, len(runs)


def test_full_is_applied_and_changes_no_number(ranks):
    for result in ranks.run(train):
        assert result == {"none": (True, 3), "before": (True, 6), "after": (True, 6)}
