"""Megatron-core on CPU and gloo: what its code asks of CUDA is answered while a test runs. Not for the package."""

import contextlib
import functools
import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ac_moe
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


# For Megatron's small functions: captured as ever, but not built by a C++ compiler, which takes half a minute.
_compiled_without_code = functools.partial(torch.compile, backend="eager")


def _to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Megatron leaves a tensor that is no CUDA tensor as it is, where gloo wants numbers."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """In here Megatron-core builds and trains on the CPU. Of it nothing is left afterwards but Megatron's groups."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(ac_moe.reference.install())  # for the import below, the first of these modules
        with mock.patch.object(torch, "compile", _compiled_without_code):
            from megatron.core import parallel_state, tensor_parallel
            from megatron.core.tensor_parallel import random as megatron_random
            from megatron.core.transformer.moe import moe_utils, token_dispatcher

        for name, stand_in in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, new=stand_in))
        stack.enter_context(mock.patch.object(torch.cuda.random, "get_rng_state", _CUDA["get_rng_state"]))
        stack.enter_context(mock.patch.object(megatron_random, "_set_cuda_rng_state"))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _to_host))
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield


# ---- models

HIDDEN, WIDE, EXPERTS, TOP_K, SEQUENCE = 32, 48, 4, 2, 6
DISPATCHERS = ("flex", "alltoall", "allgather")
RECOMPUTE = {
    "no recompute": {},
    "uniform 1": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform 2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block 1": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def config(recompute: str = "no recompute", dispatcher: str = "flex", **settings: Any) -> Any:
    """Two layers, dropout, an auxiliary loss and an expert bias."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    chosen = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": WIDE,
        "expert_model_parallel_size": dist.get_world_size(),
        "moe_token_dispatcher_type": dispatcher,
        "moe_flex_dispatcher_backend": "hybridep" if dispatcher == "flex" else "deepep",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": True,
        "init_method_std": 0.3,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
    }
    return TransformerConfig(**chosen | RECOMPUTE[recompute] | settings)


def block(configuration: Any, experts: Any = None) -> Any:
    """A `TransformerBlock`, the same on each call, with the experts of `ac_moe.megatron` unless others are given."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    import ac_moe.megatron

    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    if experts != "sequential":
        mlp = spec.submodules.mlp
        submodules = mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]  # since 0.18
        submodules.experts = experts or ac_moe.megatron.TorchGroupedExperts
    torch.manual_seed(3)
    return TransformerBlock(configuration, spec, post_layer_norm=False)


def run(model: torch.nn.Module, schedule: str = "f0 b0 f1 b1", sequence: int = SEQUENCE) -> dict[str, torch.Tensor]:
    """Trains on microbatches in the order of `schedule`; everything that must not depend on checkpointing."""
    generator = torch.Generator().manual_seed(70 + dist.get_rank())
    count = 1 + max(int(step[1:]) for step in schedule.split())
    inputs = [torch.randn(sequence, 1, HIDDEN, generator=generator).requires_grad_() for _ in range(count)]
    mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool).triu(1)
    logged()
    torch.manual_seed(11)
    losses, result = {}, {}
    for step in schedule.split():
        number = int(step[1:])
        if step[0] == "f":
            losses[number] = (model(inputs[number], attention_mask=mask).float() ** 2).sum()
        else:
            result[f"loss {number}"] = losses[number].detach()
            losses.pop(number).backward()
    result |= {f"input {i}": x.grad for i, x in enumerate(inputs)}
    result |= {name: parameter.grad for name, parameter in model.named_parameters()}
    result |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return result | {"random": torch.get_rng_state()} | logged()


def logged() -> dict[str, torch.Tensor]:
    """The auxiliary losses that Megatron has summed up since the last call."""
    from ac_moe.megatron.router import _logged_losses

    sums = _logged_losses()
    result = {f"logged {i}": values.clone() for i, values in enumerate(sums)}
    for values in sums:
        values.zero_()
    return result


# ---- counting


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts what the reference HybridEP buffer, `torch.distributed` and matrix products do on this rank in here."""
    from megatron.core.tensor_parallel import mappings

    counts: Counter[str] = Counter()
    watched = [
        (ac_moe.reference.HybridEPBuffer, "dispatch_with_permute", "dispatch"),
        (ac_moe.reference.HybridEPBuffer, "combine_with_unpermute", "combine"),
        (dist, "barrier", "barrier"),
        (dist, "all_to_all_single", "all_to_all"),
        (mappings, "dist_all_gather_func", "all_gather"),
        (mappings, "dist_reduce_scatter_func", "reduce_scatter"),
        (dist, "all_reduce", "all_reduce"),
    ]
    with contextlib.ExitStack() as stack, torch.profiler.profile() as profile:
        for owner, attribute, name in watched:
            stack.enter_context(mock.patch.object(owner, attribute, _counted(getattr(owner, attribute), counts, name)))
        yield counts
    counts["mm"] = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")


def _counted(function: Any, counts: Counter[str], name: str) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return call


def on_megatron(rank: int) -> None:
    """To be run on each rank first."""
    with megatron_on_cpu():
        stats = ac_moe.stats()
        if stats.live_entries or stats.live_pinned:
            gc.collect()  # an error that an earlier test has caught holds its frames, and they hold a graph
