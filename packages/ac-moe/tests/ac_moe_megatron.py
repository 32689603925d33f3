"""Megatron-core on CPU and gloo: what its code asks of CUDA is answered while a test runs. Never part of the package."""

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

import ac_moe.reference


class _Stream:
    """A stream on which everything has always been done."""

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> "_Stream":
        return self

    def synchronize(self) -> None: ...


_STREAM = _Stream()
_CUDA = {
    "current_device": lambda: torch.device("cpu"),
    "Stream": lambda *_, **__: _STREAM,
    "current_stream": lambda *_: _STREAM,
    "stream": lambda *_: contextlib.nullcontext(),
    "manual_seed": lambda *_: None,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
}


def _to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:  # noqa: ARG001
    """Megatron leaves a tensor that is no CUDA tensor as it is, where gloo wants numbers."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """In here Megatron-core builds and trains on the CPU. Of it nothing is left afterwards but Megatron's groups."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(ac_moe.reference.install())  # for the import below, the first of these modules
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.tensor_parallel import random as megatron_random
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

        for name, stand_in in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(torch.cuda.random, "get_rng_state", _CUDA["get_rng_state"]))
        stack.enter_context(mock.patch.object(megatron_random, "_set_cuda_rng_state", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _to_host))
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
