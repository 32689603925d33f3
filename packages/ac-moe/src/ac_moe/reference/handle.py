"""HybridEP's handles: what a dispatch returns for the combine and for later dispatches of the same routing."""

import torch

from ac_moe.reference.layout import Layout

Handle = tuple[object, ...]

# NOTE [ The handle ]
#
# DeepEP's handle of a dispatch with permute is a tuple of eleven, which callers keep and give back, and of which they
# read nothing but, perhaps, the number of tokens [8]. Here every place holds what has its role, with these shapes
# (T tokens of this rank, R rows received, W ranks, L local experts):
#
#    0  sparse_to_dense_map           int64 [T, W]  place of a token among the rows sent to a rank, -1 if none is
#    1  rdma_to_attn_map              bool [0, 1]   for several nodes; there is one
#    2  attn_to_rdma_map              bool [T, 0]   likewise
#    3  num_dispatched_tokens_tensor  int32 [1]     R
#    4  local_expert_routing_map      bool [sum of all T, L]
#    5  dense_chunk_layout            int64 [W]     rows received from each rank
#    6  dense_to_expert_map           int64 [R, L]  row of the permuted output for a received row, -1 if none
#    7  tokens_per_expert             int32 [L]     without padding
#    8  num_of_tokens_per_rank        int           T
#    9  template_config               Sizes
#    10 overflow_flag                 int32 [1]     1 where num_permuted_tokens was too small
#
# The handle of a dispatch without permute has seven: 0 to 4, 8 and 9. Handles hold no token, weight or gradient.


def permuting_handle(layout: Layout, places: torch.Tensor, counts: torch.Tensor, overflow: torch.Tensor) -> Handle:
    """The handle of a dispatch with permute; see NOTE [ The handle ]."""
    received = torch.tensor(layout.sizes.rows_received, device=places.device)
    return *_common(layout), received, places, counts.int(), _tokens(layout), layout.sizes, overflow


def of_permuting_handle(handle: Handle | None, tokens: int | None = None) -> tuple[Layout, torch.Tensor, torch.Tensor]:
    """The layout, places and counts that `permuting_handle` was given.

    Raises:
        ValueError: it is no such handle, or of another number of tokens than `tokens`.
    """
    _check(handle, 11, tokens)
    return Layout(handle[0], handle[4], handle[9]), handle[6], handle[7]


def dense_handle(layout: Layout) -> Handle:
    """The handle of a dispatch without permute; see NOTE [ The handle ]."""
    return *_common(layout), _tokens(layout), layout.sizes


def of_dense_handle(handle: Handle | None, tokens: int | None = None) -> Layout:
    """The layout that `dense_handle` was given; raises as `of_permuting_handle`."""
    _check(handle, 7, tokens)
    return Layout(handle[0], handle[4], handle[6])


def _common(layout: Layout) -> Handle:
    device = layout.local_map.device
    return (
        layout.sparse_to_dense,
        torch.empty((0, 1), dtype=torch.bool, device=device),
        torch.empty((_tokens(layout), 0), dtype=torch.bool, device=device),
        torch.tensor([sum(layout.sizes.rows_received)], dtype=torch.int32, device=device),
        layout.local_map,
    )


def _tokens(layout: Layout) -> int:
    return layout.sparse_to_dense.shape[0]


def _check(handle: Handle | None, length: int, tokens: int | None) -> None:
    if handle is None or len(handle) != length:
        told = "None" if handle is None else f"a tuple of {len(handle)}"
        raise ValueError(f"handle: {told}; expected the tuple of {length} that this way of dispatching returned")
    if tokens is not None and handle[0].shape[0] != tokens:
        raise ValueError(f"hidden: {tokens} tokens, but the handle is of a dispatch of {handle[0].shape[0]}")
