"""Megatron's experts on torch's grouped GEMM, with the router weight inside the activation."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from ac_moe.experts import down_projection, grouped_mm


class TorchGroupedExperts(MegatronModule):
    """The experts of this rank: two grouped GEMMs, and nothing between the second and the dispatcher's combine.

        MoESubmodules(experts=ac_moe.megatron.TorchGroupedExperts)

    The experts that mode `moe_tail` needs, on any device. They compute what `SequentialMLP` does, and their distributed
    checkpoints are interchangeable with those of `SequentialMLP` and `TEGroupedMLP`. The activation is
    `config.activation_func`, gated if `config.gated_linear_unit`.

    Args:
        num_local_experts: experts on this rank.
        config: of the transformer.
        pg_collection: for the expert-parallel, expert-tensor-parallel and expert-data-parallel groups.
        name: the module's path, as megatron-core from 0.18 on gives it; not used.

    Raises:
        ValueError: one line for each field of `config` that asks for something these experts do not do.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,  # noqa: ARG002
    ) -> None:
        super().__init__(config=config)
        _check(config, pg_collection)
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        self.dp_group = pg_collection.expt_dp
        hidden = config.moe_latent_size or config.hidden_size
        wide = config.moe_ffn_hidden_size
        # As nn.Linear has it, [out, in] for each expert.
        self.weight1 = self._weight(wide * (2 if config.gated_linear_unit else 1), hidden, config.init_method)
        self.weight2 = self._weight(hidden, wide, config.output_layer_init_method)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Runs each expert on its rows.

        Args:
            permuted_local_hidden_states: `[rows, hidden]`, ordered by expert.
            tokens_per_expert: integer `[local experts]`, on any device.
            permuted_probs: `[rows]`, the router weights.

        Returns:
            `[rows, hidden]`, for the dispatcher's combine alone, and no bias.
        """
        rows = permuted_local_hidden_states
        offsets = tokens_per_expert.to(rows.device).cumsum(0).int()
        inner = self._activate(grouped_mm(rows, self.weight1.transpose(1, 2), offsets))
        weighted = (inner * permuted_probs[:, None]).to(rows.dtype)
        return down_projection(weighted, self.weight2.transpose(1, 2), offsets), None

    def backward_dw(self) -> None:
        """Nothing: weight gradients are computed with the others."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """The weights under the keys and in the global shapes `[experts, out, in]` of `SequentialMLP`.

        Raises:
            ValueError: `metadata` asks for `singleton_local_shards`.
        """
        if (metadata or {}).get("singleton_local_shards"):
            raise ValueError(
                "metadata: singleton_local_shards=True saves each expert under a key of its own, which "
                "TorchGroupedExperts does not; save with singleton_local_shards=False"
            )
        axis = len(sharded_offsets)
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{linear}.weight",
                getattr(self, name),
                *sharded_offsets,
                (axis, self.ep_group.rank(), self.ep_group.size()),
                replica_id=(0, 0, self.dp_group.rank()),
                prepend_axis_num=axis,
            )
            for name, linear in (("weight1", "linear_fc1"), ("weight2", "linear_fc2"))
        }

    def _activate(self, inner: torch.Tensor) -> torch.Tensor:
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(inner)
        gate, linear = inner.chunk(2, -1)
        limit = config.activation_func_clamp_value
        if limit is not None:
            gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        return config.activation_func(gate) * (linear + config.glu_linear_offset)

    def _weight(self, out: int, into: int, initialize: Callable[[torch.Tensor], object]) -> nn.Parameter:
        config = self.config
        on_cpu = config.use_cpu_initialization
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        weight = nn.Parameter(torch.empty(self.num_local_experts, out, into, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            with _own_random_numbers(on_cpu), torch.no_grad():
                self._initialize(weight, initialize, on_cpu)
        # Megatron's data parallelism reduces over the expert-data-parallel group what says so.
        weight.allreduce = config.expert_model_parallel_size == 1
        return weight

    def _initialize(self, weight: torch.Tensor, initialize: Callable[[torch.Tensor], object], on_cpu: bool) -> None:
        if not on_cpu:
            for expert in weight:
                initialize(expert)
            return
        # The ranks draw the same numbers: each draws for every expert, and the weights do not depend on how many ranks
        # there are.
        first = self.ep_group.rank() * self.num_local_experts
        drawn = torch.empty_like(weight[0], dtype=torch.float32)
        for number in range(self.ep_group.size() * self.num_local_experts):
            initialize(drawn)
            if first <= number < first + self.num_local_experts:
                weight[number - first].copy_(drawn)


def _own_random_numbers(on_cpu: bool) -> AbstractContextManager[object]:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if on_cpu or not tracker.is_initialized():
        return contextlib.nullcontext()
    return tracker.fork(get_expert_parallel_rng_tracker_name())


def _check(config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> None:
    if pg_collection is None:
        raise ValueError("pg_collection: None; TorchGroupedExperts needs the process groups that MoELayer gives")
    selective = config.recompute_granularity == "selective"
    found = {
        "add_bias_linear: True; experts on torch's grouped GEMM have no bias": config.add_bias_linear,
        "fp8, fp4: set; experts on torch's grouped GEMM multiply in params_dtype": config.fp8 or config.fp4,
        "moe_apply_probs_on_input: True; the router weight is applied inside the activation": (
            config.moe_apply_probs_on_input
        ),
        "use_te_activation_func: True; the activation is config.activation_func": config.use_te_activation_func,
        "recompute_modules: 'moe_act' is not recomputed here; use 'moe', or recompute_granularity='full'": (
            selective and "moe_act" in config.recompute_modules
        ),
        "expert_tensor_parallel_size: more than 1; each expert is whole here": pg_collection.expt_tp.size() > 1,
    }
    mistakes = [text for text, holds in found.items() if holds]
    if mistakes:
        raise ValueError("\n".join(mistakes))
