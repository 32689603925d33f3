"""`deep_ep.HybridEPBuffer`, as its `hybrid-ep` branch has it, in plain `torch.distributed`."""

# The signatures are DeepEP's, with what only its kernels need.
# ruff: noqa: ARG002, PLR0917

import torch
import torch.distributed as dist

from ac_moe.reference.arguments import at_least_float32, float32, refuse_fp8, routing
from ac_moe.reference.handle import Handle, dense_handle, of_dense_handle, of_permuting_handle, permuting_handle
from ac_moe.reference.layout import Layout, Sizes, expert_places, gather_routing, padded


class HybridEPBuffer:
    """Sends tokens to the ranks of their experts and sums what comes back, without gradients, for one group.

    Made to run and test on the CPU what is written for DeepEP's kernels; the methods take and return what theirs do
    (`deep_ep/hybrid_ep_buffer.py`, branch `hybrid-ep`, 2026-07). A dispatch without a handle first agrees with the
    group on the layout (all-gathers), then sends rows and, if there are any, probabilities (an all-to-all each). With
    a handle it agrees on nothing. `combine_with_unpermute` meets at a barrier and then sends, as the kernel does.

    It takes more than the kernels: any device, backend and floating dtype, and ranks with different numbers of tokens.
    It does not take fp8. Nothing is allocated ahead, so the sizes given are not limits.

    Args:
        group: the expert-parallel process group.
        hidden_dim, max_num_of_tokens_per_rank: not needed here.
        num_local_experts: experts on each rank, unless a dispatch says otherwise.
        use_fp8: must be false.
        num_sms_dispatch_api and all that follow: of the kernels, without meaning here.

    Raises:
        ValueError: `use_fp8`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        refuse_fp8(use_fp8, None)
        self.group = group
        self.rank = group.rank()
        self.group_size = group.size()
        self.num_local_experts = num_local_experts

    # ---- rows ordered by expert

    @torch.no_grad()
    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | torch.Tensor | None = None,
        pad_multiple: int | None = None,
        handle: Handle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor | None, Handle]:
        """Sends each token to its experts.

        Args:
            hidden: `[tokens, hidden]`.
            topk_idx: integer `[tokens, top_k]`, with `num_of_experts`; or else `routing_map`.
            topk_weights: `[tokens, top_k]` float32, for `topk_idx`.
            routing_map: bool `[tokens, experts]`.
            probs: float32 `[tokens, experts]`, for `routing_map`, or with a `handle`.
            num_permuted_tokens: how many rows to return: an int or a tensor of one element. Without a handle None
                takes what the layout needs. Rows beyond that need are NaN (the kernels leave them uninitialised).
                If it is less than needed, the rows beyond are dropped and the handle's overflow flag is 1.
            pad_multiple: each expert's block is padded with zero rows to a multiple of it; None or 0 for no padding.
            handle: of an earlier dispatch, whose layout is taken as it is; then no routing is given.
            non_blocking: `tokens_per_expert` stays on the device, and `num_permuted_tokens` is required.
            num_dispatched_tokens, use_host_meta, fuse_permute_dispatch: of the kernels, without meaning here.

        Returns:
            `(rows [R, hidden], probs [R] float32 or None, None, tokens_per_expert, handle)`: rows are ordered by
            (local expert, source rank, token). `tokens_per_expert` is int64 `[local experts]` and counts the padding;
            with a `handle` it is None, as with the kernels.

        Raises:
            ValueError: a combination or shape that the kernels cannot take.
        """
        refuse_fp8(use_fp8, scaling_factor)
        tokens = hidden.shape[0]
        pad = pad_multiple or 1
        if non_blocking and num_permuted_tokens is None:
            raise ValueError("num_permuted_tokens: None, but non_blocking=True needs the number of rows beforehand")
        if non_blocking and int(num_permuted_tokens) % pad:
            raise ValueError(
                f"num_permuted_tokens: {int(num_permuted_tokens)} is not a multiple of pad_multiple, {pad}"
            )
        tokens_per_expert = None
        if handle is None:
            routing_map, probs = routing(
                tokens,
                routing_map=routing_map,
                probs=probs,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_of_experts=num_of_experts,
            )
            layout = self._gather(routing_map, num_of_experts_per_rank)
            layout = layout._replace(sizes=layout.sizes._replace(pad_multiple=pad))
            places, counts = self._permutation(layout, pad)
            needed = padded(counts, pad)
            tokens_per_expert = needed if non_blocking else needed.cpu()
            rows = int(needed.sum()) if num_permuted_tokens is None else int(num_permuted_tokens)
            overflow = (needed.sum() > rows).int().reshape(1)
            handle = permuting_handle(layout, places, counts, overflow)
        else:
            if num_permuted_tokens is None:
                raise ValueError("num_permuted_tokens: None, but a dispatch with a handle needs the number of rows")
            rows = int(num_permuted_tokens)
        layout, places, counts = of_permuting_handle(handle, tokens)
        sizes = layout.sizes

        received = self._send(hidden[layout.sent], sizes)
        permuted = hidden.new_full((rows, *hidden.shape[1:]), float("nan"))
        permuted[: int(padded(counts, sizes.pad_multiple).sum())] = 0
        source, expert = ((places >= 0) & (places < rows)).nonzero(as_tuple=True)
        permuted[places[source, expert]] = received[source]
        permuted_probs = None
        if probs is not None:
            probs = self._send(self._by_destination(float32(probs, (tokens, sizes.experts)), layout), sizes)
            permuted_probs = permuted.new_zeros(rows, dtype=torch.float32)
            permuted_probs[places[source, expert]] = probs[source, expert]
        return permuted, permuted_probs, None, tokens_per_expert, handle

    @torch.no_grad()
    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: Handle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums for each token what its experts made of it: unweighted, in at least float32, in the order of experts.

        As in the kernels, each rank's sum travels in the dtype of `hidden`, and those sums are added.

        Args:
            hidden: `[R, hidden]`, in the order of the dispatch. Padding rows are not read.
            probs: float32 `[R]`: one value for each row, returned to the place of its token and expert.
            handle: of the dispatch.
            pad_multiple, fuse_unpermute_combine, num_dispatched_tokens: of the kernels, without meaning here.

        Returns:
            `(tokens [tokens, hidden], probs [tokens, experts] float32 or None)`, dtype of `hidden`.

        Raises:
            ValueError: no handle.
        """
        layout, places, _ = of_permuting_handle(handle)
        rows = hidden.shape[0]
        places = torch.where(places < rows, places, -1)
        partial = hidden.new_zeros((places.shape[0], *hidden.shape[1:]), dtype=at_least_float32(hidden.dtype))
        for place in places.unbind(1):
            mine = place >= 0
            partial[mine] += hidden[place[mine]]
        partial_probs = None
        if probs is not None:
            partial_probs = torch.where(places >= 0, float32(probs, (rows,))[places.clamp(min=0)], 0.0)
        return self._combine(partial.to(hidden.dtype), partial_probs, layout)

    # ---- one row per token and rank

    @torch.no_grad()
    def dispatch(
        self,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts: int | None = None,
        probs: torch.Tensor | None = None,
        routing_map: torch.Tensor | None = None,
        num_dispatched_tokens_tensor: torch.Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: Handle | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, Handle]:
        """Sends each token once to each rank that has an expert of it; arguments as in `dispatch_with_permute`.

        Returns:
            `(rows [R, hidden], probs [R, experts] float32 or None, None, handle)`, ordered by (source rank, token).
            Of the probabilities only the columns of this rank's experts are filled.
        """
        refuse_fp8(False, scaling_factor)
        tokens = hidden.shape[0]
        if handle is None:
            routing_map, probs = routing(
                tokens,
                routing_map=routing_map,
                probs=probs,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_of_experts=num_of_experts,
            )
            layout = self._gather(routing_map, None)
            handle = dense_handle(layout)
        layout = of_dense_handle(handle, tokens)
        rows = self._send(hidden[layout.sent], layout.sizes)
        received_probs = None
        if probs is not None:
            sizes = layout.sizes
            mine = self._send(self._by_destination(float32(probs, (tokens, sizes.experts)), layout), sizes)
            received_probs = mine.new_zeros((mine.shape[0], self.group_size, sizes.local_experts))
            received_probs[:, self.rank] = mine
            received_probs = received_probs.flatten(1)
        return rows, received_probs, None, handle

    @torch.no_grad()
    def combine(
        self, hidden: torch.Tensor, probs: torch.Tensor | None = None, handle: Handle | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums for each token the rows of its ranks; the inverse of `dispatch`, arguments as in it."""
        layout = of_dense_handle(handle)
        if probs is not None:
            whole = float32(probs, (hidden.shape[0], layout.sizes.experts))
            probs = whole.view(hidden.shape[0], self.group_size, layout.sizes.local_experts)[:, self.rank]
        return self._combine(hidden, probs, layout)

    # ---- the parts

    def _permutation(self, layout: Layout, pad_multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The permuted row of each (received row, local expert), and the rows of each expert without padding.

        The kernels promise the expert's block, not the order inside it: a subclass may return another order.
        """
        dense_map = layout.local_map[layout.local_map.any(-1)]
        return expert_places(dense_map, pad_multiple), dense_map.sum(0)

    def _gather(self, routing_map: torch.Tensor, local_experts: int | None) -> Layout:
        local = local_experts or self.num_local_experts
        experts = routing_map.shape[1]
        if experts != local * self.group_size:
            raise ValueError(
                f"routing_map: {experts} experts do not fit {self.group_size} ranks with {local} experts each"
            )
        return gather_routing(routing_map, local, self.group)

    def _send(self, rows: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        return self._all_to_all(rows, sizes.rows_sent, sizes.rows_received)

    def _combine(
        self, partial: torch.Tensor, probs: torch.Tensor | None, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of (source rank, token) back to their tokens. `probs` is `[R, local experts]`."""
        sizes = layout.sizes
        dist.barrier(group=self.group)
        tokens = layout.sparse_to_dense.shape[0]
        places = (layout.sparse_to_dense >= 0).unbind(1)
        back = self._all_to_all(partial, sizes.rows_received, sizes.rows_sent)
        combined = back.new_zeros((tokens, *back.shape[1:]), dtype=at_least_float32(back.dtype))
        for mine, part in zip(places, back.split(sizes.rows_sent), strict=True):
            combined[mine] += part
        combined_probs = None
        if probs is not None:
            back = self._all_to_all(probs, sizes.rows_received, sizes.rows_sent)
            combined_probs = back.new_zeros((tokens, self.group_size, sizes.local_experts))
            for rank, (mine, part) in enumerate(zip(places, back.split(sizes.rows_sent), strict=True)):
                combined_probs[mine, rank] = part
            combined_probs = combined_probs.flatten(1)
        return combined.to(partial.dtype), combined_probs

    def _by_destination(self, probs: torch.Tensor, layout: Layout) -> torch.Tensor:
        """`[tokens, experts]` to `[rows sent, local experts]`: for each row those of the experts of its rank."""
        parts = probs.view(probs.shape[0], self.group_size, layout.sizes.local_experts).transpose(0, 1)
        return parts[(layout.sparse_to_dense >= 0).t()]

    def _all_to_all(self, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        received = sent.new_empty((sum(receive), *sent.shape[1:]))
        dist.all_to_all_single(received, sent.contiguous(), receive, send, group=self.group)
        return received
