"""Expert parallelism over DeepEP's HybridEP, or its reference in plain `torch.distributed`."""

import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ac_moe.cache.modes import without_dispatch_modes
from ac_moe.cache.region import claim
from ac_moe.dispatch.base import Dispatcher
from ac_moe.dispatch.hybridep_exchange import Buffer, HybridEPExchange
from ac_moe.routing.check import check

LAYOUT = "layout"
"""Kind of the layouts that a region keeps."""

# NOTE [ The forward's layout ]
#
# HybridEP promises each expert's block, not the order of the rows inside it, and has been seen to return other orders,
# even other numbers of rows, for the same routing (NVIDIA-NeMo/Automodel#3743).
#
# 1. Without reentry the backward goes through the forward's nodes with what the recompute's experts saved. Both must
#    be in one order. So under an ac-moe context the recompute dispatches by the handle of the forward.
# 2. What is kept is the exchange, whose handle the forward's node holds anyway: no memory is added. It holds no graph.
# 3. With the handle the rows travel where the forward sent them, whatever the router now says, but with weights that
#    may be of other experts. So the routing is compared first (`ac_moe.routing.check`).


class HybridEPDispatcher(Dispatcher):
    """`AllToAllDispatcher`, on the kernels of DeepEP's HybridEP. One per MoE layer; see there for what it shares.

    What differs: router weights arrive as float32; a token may name an expert once only; rows inside an expert's block
    come in the order of the buffer; each expert's block can be padded with zero rows, which `combine` does not read.

    To dispatch the buffer agrees on a layout and sends rows with their weights; to combine it meets at a barrier and
    sends. The recompute of a block that is checkpointed with an ac-moe context takes over the forward's layout, and
    makes sure that the routing is the forward's: see `ac_moe.routing.check` for what that costs. So with plain `none`,
    which has no context, a buffer that orders rows anew gives wrong gradients; `context_fn("none", pin_routing=True)`
    gives right ones.

    DeepEP's kernels take bfloat16 and float16 tokens on a GPU, and the same number of tokens on every rank; see
    `max_tokens_per_rank`. The reference takes any.

    Args:
        num_experts, group, name: see `AllToAllDispatcher`.
        buffer: what makes a buffer, called with `group`, `hidden_dim`, `max_num_of_tokens_per_rank` and
            `num_local_experts` by keyword; or a buffer. None takes `deep_ep.HybridEPBuffer`. Dispatchers that are given
            the same maker share one buffer a group.
        pad_multiple: pads each expert's block to a multiple of it, for a grouped GEMM.
        max_tokens_per_rank: fills each rank's tokens up to this many with some that go nowhere, for DeepEP's kernels
            where ranks have different numbers. None for no filling.
        check_routing: in a recompute, compare which token goes where, not only how many go to each expert.

    Raises:
        ModuleNotFoundError: no `buffer`, and DeepEP is not installed.
        ValueError: a number is not a positive integer.
        TypeError: `buffer` neither makes buffers nor is one.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup | None = None,
        *,
        name: str | None = None,
        buffer: Buffer | Callable[..., Buffer] | None = None,
        pad_multiple: int | None = None,
        max_tokens_per_rank: int | None = None,
        check_routing: bool = True,
    ) -> None:
        super().__init__(num_experts, group, name=name)
        for field, value in (("pad_multiple", pad_multiple), ("max_tokens_per_rank", max_tokens_per_rank)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field}: {value!r} is not a positive integer")
        if buffer is None:
            buffer = _installed()
        if not callable(buffer) and not _is_buffer(buffer):
            raise TypeError(
                f"buffer: {buffer!r} neither has dispatch_with_permute and combine_with_unpermute nor makes what has; "
                "give deep_ep.HybridEPBuffer, ac_moe.reference.HybridEPBuffer, or one of them made"
            )
        self.pad_multiple = pad_multiple
        self.max_tokens_per_rank = max_tokens_per_rank
        self.check_routing = check_routing
        self._maker = buffer
        self._made: tuple[dist.ProcessGroup, Buffer] | None = None

    def _plan(self, tokens: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> HybridEPExchange:
        self._check(tokens, weights)
        group = self.group or dist.group.WORLD
        check(self._site, expert_ids, self.num_experts, group, checksum=self.check_routing)
        claimed = claim(self._site, LAYOUT)
        if claimed.kept is not None:
            claimed.pass_on()
            return claimed.kept.value
        with torch.no_grad(), without_dispatch_modes():
            ids = expert_ids.long()
            self._check_ids(ids)
        exchange = HybridEPExchange(
            self._buffer(group, tokens),
            ids,
            num_experts=self.num_experts,
            local_experts=len(self.local_experts),
            sent_tokens=self.max_tokens_per_rank or tokens.shape[0],
            pad_multiple=self.pad_multiple,
        )
        claimed.keep(exchange)
        return exchange

    def _check(self, tokens: torch.Tensor, weights: torch.Tensor) -> None:
        if weights.dtype == torch.float64:
            raise ValueError("weights: torch.float64; HybridEP carries float32, give it `weights.float()`")
        if self.max_tokens_per_rank is not None and tokens.shape[0] > self.max_tokens_per_rank:
            raise ValueError(f"tokens: {tokens.shape[0]} are more than max_tokens_per_rank={self.max_tokens_per_rank}")
        kernels = getattr(self._maker, "__module__", "").partition(".")[0] == "deep_ep"
        if kernels and (tokens.element_size() != 2 or not tokens.is_cuda):
            raise ValueError(
                f"tokens: {tokens.dtype} on {tokens.device}; DeepEP's kernels take bfloat16 and float16 on a GPU. For "
                "others give buffer=ac_moe.reference.HybridEPBuffer, or take AllToAllDispatcher"
            )

    def _check_ids(self, ids: torch.Tensor) -> None:
        """One wait for the device. Raises on this rank alone: a router with too many outputs has them on every rank."""
        in_range = ((ids >= 0) & (ids < self.num_experts)).all()
        ordered = ids.sort(-1).values
        different = (ordered[:, 1:] != ordered[:, :-1]).all()
        fine = torch.stack([in_range, different]).tolist()
        if not fine[0]:
            raise ValueError(f"expert_ids: must be in [0, {self.num_experts}); some on rank {dist.get_rank()} are not")
        if not fine[1]:
            raise ValueError(
                f"expert_ids: some token on rank {dist.get_rank()} names an expert twice; HybridEP sends a token to an "
                "expert once. Add up the weights of equal experts, or take AllToAllDispatcher"
            )

    def _buffer(self, group: dist.ProcessGroup, tokens: torch.Tensor) -> Buffer:
        if _is_buffer(self._maker):
            return self._maker
        if self._made is None or self._made[0] is not group:
            key = (self._maker, group)
            buffer = _buffers.get(key)
            if buffer is None:
                buffer = self._maker(
                    group=group,
                    hidden_dim=tokens.shape[1],
                    max_num_of_tokens_per_rank=self.max_tokens_per_rank or max(tokens.shape[0], 1),
                    num_local_experts=len(self.local_experts),
                )
                _buffers[key] = buffer
            self._made = (group, buffer)
        return self._made[1]

    def __getstate__(self) -> dict[str, Any]:
        if _is_buffer(self._maker):
            raise TypeError(
                f"{self._site} cannot be pickled: its buffer is a connection of this process. Give the dispatcher what "
                "makes buffers, such as deep_ep.HybridEPBuffer, or save the model's state_dict."
            )
        return super().__getstate__() | {"_made": None}


# A buffer is large, and lives as long as some dispatcher uses it.
_buffers: "weakref.WeakValueDictionary[tuple[object, dist.ProcessGroup], Buffer]" = weakref.WeakValueDictionary()


def _is_buffer(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "dispatch_with_permute")


def _installed() -> Callable[..., Buffer]:
    try:
        return importlib.import_module("deep_ep").HybridEPBuffer
    except (ImportError, AttributeError) as error:  # DeepEP's other branches have no HybridEP
        raise ModuleNotFoundError(
            f"buffer: None, and deep_ep.HybridEPBuffer cannot be imported ({error}). Install DeepEP's hybrid-ep branch "
            "(https://github.com/deepseek-ai/DeepEP/tree/hybrid-ep), give buffer=ac_moe.reference.HybridEPBuffer, "
            "which runs anywhere, or take AllToAllDispatcher."
        ) from error
