"""Routing of one call of the HybridEP dispatcher: the buffer, the handle, and the sends themselves."""

import dataclasses
from typing import Any, Protocol

import torch
from torch.nn import functional

from ac_moe.cache.region import version_of


class Buffer(Protocol):
    """What is used of `deep_ep.HybridEPBuffer`; see `ac_moe.reference.HybridEPBuffer` for what it means."""

    def dispatch_with_permute(self, **arguments: Any) -> tuple[Any, ...]: ...

    def combine_with_unpermute(self, **arguments: Any) -> tuple[Any, ...]: ...


@dataclasses.dataclass(frozen=True)
class HybridEPRouting:
    """What the experts of this rank received, in plain numbers."""

    tokens: int
    tokens_per_expert: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.tokens} tokens, tokens per expert {list(self.tokens_per_expert)}"


class HybridEPExchange:
    """Implements `ac_moe.dispatch.base.Exchange` with a HybridEP buffer.

    The first `send` makes the layout, the buffer's handle; all later transfers, those of the recompute among them, use
    it. It lives as long as the autograd nodes that need it, and the region of the block that it is kept for.

    Args:
        expert_ids: int64 `[tokens, top_k]`, in range and different for each token. Not copied, so a change in place is
            an error.
        sent_tokens: how many tokens the buffer is given; those beyond `tokens` go nowhere.
        pad_multiple: of each expert's block, None for no padding.
    """

    collectives = 2  # combine: a barrier and an all-to-all

    def __init__(
        self,
        buffer: Buffer,
        expert_ids: torch.Tensor,
        *,
        num_experts: int,
        local_experts: int,
        sent_tokens: int,
        pad_multiple: int | None,
    ) -> None:
        self._buffer = buffer
        self._given_ids = expert_ids
        self._version = version_of(expert_ids)
        self._num_experts = num_experts
        self._local_experts = local_experts
        self._filling = sent_tokens - expert_ids.shape[0]
        self._pad_multiple = pad_multiple
        self._handle: tuple[object, ...] | None = None
        self.splits: tuple[int, ...] = ()
        self._tokens_per_expert = expert_ids.new_empty(0)

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        return self._tokens_per_expert.clone()  # the caller's own, as the recompute is given it too

    @property
    def _ids(self) -> torch.Tensor:
        if version_of(self._given_ids) != self._version:
            raise RuntimeError(
                "expert_ids were changed in place after they were given to dispatch, and the way back and the "
                "recompute need them as they were. Change a copy."
            )
        return self._given_ids

    @property
    def fingerprint(self) -> HybridEPRouting:
        return HybridEPRouting(self._given_ids.shape[0], self.splits)

    def send(self, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[tokens, hidden]` to `[rows, hidden]`, and `[tokens, top_k]` to float32 `[rows]`."""
        probs = self._dense(weights.float())
        if self._handle is not None:
            return self._by_handle(tokens, probs)
        rows, row_probs, _, counts, handle = self._buffer.dispatch_with_permute(
            hidden=self._filled(tokens),
            routing_map=self._dense(torch.ones_like(self._ids, dtype=torch.bool)),
            probs=probs,
            num_of_experts_per_rank=self._local_experts,
            pad_multiple=self._pad_multiple,
        )
        self._handle = handle
        self.splits = tuple(counts.tolist())
        self._tokens_per_expert = counts.to(tokens.device)
        return rows, row_probs

    def send_back(
        self, rows: torch.Tensor, weights: torch.Tensor, needed: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The adjoint of `send`: a sum over each token's rows, and each row's value to its slot."""
        if not any(needed):
            return None, None
        tokens, probs = self._to_tokens(rows, weights.contiguous() if needed[1] else None)
        return (
            tokens if needed[0] else None,
            # Float32; autograd makes it the dtype of the weights.
            probs[: self._ids.shape[0]].gather(1, self._ids) if needed[1] else None,
        )

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` to `[rows, hidden]`, by the layout that `send` has made."""
        return self._by_handle(tokens, None)[0]

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to `[tokens, hidden]`, dtype of `rows`, summed in at least float32."""
        return self._to_tokens(rows, None)[0]

    def _by_handle(self, tokens: torch.Tensor, probs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        rows, row_probs, *_ = self._buffer.dispatch_with_permute(
            hidden=self._filled(tokens),
            probs=probs,
            handle=self._handle,
            num_permuted_tokens=sum(self.splits),
            pad_multiple=self._pad_multiple,
        )
        return rows, row_probs

    def _to_tokens(self, rows: torch.Tensor, probs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, probs = self._buffer.combine_with_unpermute(
            hidden=rows.contiguous(), probs=probs, handle=self._handle, pad_multiple=self._pad_multiple
        )
        # A copy: a view would keep the filling too for as long as the block keeps its output.
        return tokens[: self._ids.shape[0]].clone() if self._filling else tokens, probs

    def _filled(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.pad(tokens, (0, 0, 0, self._filling)).contiguous() if self._filling else tokens.contiguous()

    def _dense(self, slots: torch.Tensor) -> torch.Tensor:
        """`[tokens, top_k]` to `[sent tokens, experts]`, zero where a token does not go."""
        dense = slots.new_zeros((slots.shape[0] + self._filling, self._num_experts))
        dense[: slots.shape[0]].scatter_(1, self._ids, slots)
        return dense
