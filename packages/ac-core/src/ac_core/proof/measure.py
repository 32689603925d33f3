"""Bytes and FLOPs of one step, counted."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ac_core.errors import ActivationCheckpointingError
from ac_core.proof.meters import Flops, LiveBytes
from ac_core.proof.restore import restored
from ac_core.proof.step import Loss, check_model, copy_batch, run_forward
from ac_core.sizes import size_text


@dataclass(frozen=True)
class Usage:
    """What one forward and backward takes. Of a sharded model: on this rank.

    saved_bytes: bytes that the forward creates and that live until the backward needs them. Parameters, the batch and
        what outlasts the step are not among them, and of the output only what the backward needs.
    peak_bytes: the most bytes alive at once in forward and backward, above those before; gradients included.
    forward_flops, backward_flops: FLOPs of matrix multiplications, convolutions and attention in each.
    recompute_flops: FLOPs of what checkpointing runs again, in none of the other two.
    host_bytes: the most that offloading has in host memory at once, in none of the others; so too on the CPU, where
        that is the same memory.
    """

    saved_bytes: int
    peak_bytes: int
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    host_bytes: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        share = f" ({self.recompute_flops / self.forward_flops:.1%} of the forward)" if self.recompute_flops else ""
        host = f", on the host {size_text(self.host_bytes)}" if self.host_bytes else ""
        return (
            f"saved for backward {size_text(self.saved_bytes)}, peak {size_text(self.peak_bytes)}{host}; forward "
            f"{self.forward_flops:,} FLOPs, backward {self.backward_flops:,}, recompute {self.recompute_flops:,}{share}"
        )


def measure(model: nn.Module, batch: Mapping[str, Any] | tuple | list | Tensor, *, loss: Loss | None = None) -> Usage:
    """Count what one forward and backward of `model` on `batch` takes, as the model is: checkpointed or not.

    Nothing is timed, and the numbers are the same on every call: a step is run before the one that is counted, since
    the first of a model may set up or learn something. No trace is left: gradients, buffers, the modules' counters and
    the random-number generators are put back, also after an error. Works on real tensors, on the meta device and under
    `FakeTensorMode`, and on models wrapped in DDP or sharded by FSDP2 (call it on every rank).

    Args:
        model: any module, in the mode (`train()` or `eval()`) to be measured.
        batch: a mapping of keyword arguments, a tuple or list of positional ones, or one tensor.
        loss: from the output of the model to what is differentiated. Without it: `output.loss` or `output["loss"]`,
            else a scalar output, else all floating-point tensors of the output.

    Raises:
        TypeError: `model` is no module, `batch` is none of these, `loss` does not return a tensor.
        ActivationCheckpointingError: nothing needs a gradient; a part of the model is compiled; the step changes a
            parameter.
    """
    check_model(model)
    _refuse_compiled(model)
    for _ in range(_steps_until_settled(model)):
        with torch.inference_mode(mode=False), restored(model):
            run_forward(model, copy_batch(batch), loss)[0].backward()
    with torch.inference_mode(mode=False), restored(model):
        batch = copy_batch(batch)
        with _older_garbage_gone(), Flops() as flops, LiveBytes() as live:
            forward = run_forward(model, batch, loss)[0]  # of the output nothing is kept
            gc.collect()
            _wait_for_collectives()
            at_end = live.alive()
            parameters = live.numbers(model.parameters())  # FSDP2's gathered ones
            flops.in_backward = True
            forward.backward()
            del forward
            gc.collect()
            after = live.alive()  # buckets of DDP's, a cache that the model keeps: not for this backward
        saved = sum(
            size - after.get(number, 0) for number, size in at_end.items() if number not in parameters and size > 0
        )
    return Usage(saved, live.peak, flops.forward, flops.backward, flops.recompute, live.host_peak)


def _steps_until_settled(model: nn.Module) -> int:
    # DDP allocates its buckets again, in the order in which gradients came: in its second forward, or in its third with
    # static_graph=True.
    return 3 if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()) else 1


def _wait_for_collectives() -> None:
    # A thread of gloo's may hold the buffers of a collective for a moment after it is done: seen once in 240 forwards.
    if dist.is_available() and dist.is_initialized():
        time.sleep(0.1)


@contextmanager
def _older_garbage_gone() -> Iterator[None]:
    # A cycle left over from before could free its storages in the midst of the step. With what remains set aside, the
    # collections in the step look at the step's objects alone: tens of milliseconds less each.
    gc.collect()
    free = gc.get_freeze_count() == 0
    if free:
        gc.freeze()
    try:
        yield
    finally:
        if free:
            gc.unfreeze()


def _refuse_compiled(model: nn.Module) -> None:
    # Under a dispatch mode compiled code is left for the eager code it was made from.
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            what = f"'{name}'" if name else "the model"
            raise ActivationCheckpointingError(
                f"{what} is compiled, and what compiled code saves and recomputes cannot be counted operation by "
                "operation; measure the model without torch.compile"
            )
