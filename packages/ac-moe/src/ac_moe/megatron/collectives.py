"""Megatron's `allgather` and `alltoall` dispatchers: their combine, kept."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ac_moe.cache.combine import combine
from ac_moe.cache.region import Site
from ac_moe.megatron.replacement import Replacement, remove_replacements

# ---- allgather: rows are summed where they were computed, then reduce-scattered


class AllGatherCombine(Replacement):
    """`token_combine` of an all-gather dispatcher: what the reduce-scatter gives, `[tokens, hidden]`, is kept."""

    def __init__(self, dispatcher: Any, site: Site) -> None:
        super().__init__(dispatcher, "token_combine")
        self.site = site

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        exchange = ReduceScatterExchange(self.original, self.owner.tp_ep_group)
        return combine(hidden_states, exchange, self.site)


@dataclasses.dataclass(frozen=True, eq=False)
class ReduceScatterExchange:
    """Implements `ac_moe.cache.combine.Exchange` for `MoEAllGatherTokenDispatcher`."""

    run: Callable[[torch.Tensor], torch.Tensor]
    group: dist.ProcessGroup
    collectives: int = 1
    fingerprint: object = None

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return self.run(rows)

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        # Megatron gathers in the dtype of the probabilities, in which it summed. The values are the same.
        return gather_from_sequence_parallel_region(tokens, group=self.group)


# ---- alltoall: rows come back to their tokens, top_k for each, and are summed there


class AllToAllPostponed(Replacement):
    """`token_combine` of an all-to-all dispatcher: nothing yet, `AllToAllCombine` does both steps in one."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher, "token_combine")

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class AllToAllCombine(Replacement):
    """`combine_postprocess`: its `[tokens, hidden]` are kept, and not the `top_k` times as many rows before."""

    def __init__(self, dispatcher: Any, site: Site) -> None:
        super().__init__(dispatcher, "combine_postprocess")
        self.site = site

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return combine(hidden_states, AllToAllSumExchange.of(self.owner, hidden_states.shape[0]), self.site)


@dataclasses.dataclass(frozen=True, eq=False)
class AllToAllSumExchange:
    """Implements `ac_moe.cache.combine.Exchange` for `MoEAlltoAllTokenDispatcher`."""

    dispatcher: Any
    """A copy with the attributes of this call, which the next one overwrites in the original."""
    rows: int
    """That come back to this rank."""
    fingerprint: tuple[tuple[int, ...], ...]
    collectives: int = 1

    @classmethod
    def of(cls, dispatcher: Any, received: int) -> "AllToAllSumExchange":
        then = copy.copy(dispatcher)
        remove_replacements(then)
        then.probs = None  # only its dtype was needed, before; it holds the router's graph
        splits = [tuple(map(int, part)) for part in (then.input_splits, then.output_splits) if part is not None]
        return cls(then, sum(splits[0]) if splits else received, tuple(splits))

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return self.dispatcher.combine_postprocess(self.dispatcher.token_combine(rows))

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import all_to_all

        then = self.dispatcher
        # The sum's adjoint, from autograd: it is linear, so it can be asked at zero, and Megatron has three ways of
        # summing (plain, fused, with capacity) that save other things.
        with torch.enable_grad():
            rows = tokens.new_zeros((self.rows, tokens.shape[-1]), requires_grad=True)
            (grad,) = torch.autograd.grad(then.combine_postprocess(rows), rows, tokens)
        return all_to_all(then.ep_group, grad, then.output_splits, then.input_splits)
