"""Routing of one call of the plain all-to-all dispatcher: who sends which rows to whom, and the sends themselves."""

import dataclasses

import torch
import torch.distributed as dist

from ac_moe.routing.fingerprint import routing_checksum

# NOTE [ Order of rows ]
#
# 1. Experts lie in equal consecutive parts on the ranks of the group: with L per rank, expert e is on rank e // L.
# 2. Sent rows are in the order of (expert, token, slot), by a stable sort. So each rank's part is consecutive.
# 3. Received rows come as (source rank, local expert, token). Experts get them as (local expert, source rank, token),
#    as with HybridEP: one consecutive block per expert, for a grouped GEMM or a loop.
# 4. No step adds in an order that depends on timing: permutations, and one sum over the top_k slots of a token in
#    float32 (float64 for float64 rows). The result is deterministic on every device.


@dataclasses.dataclass(frozen=True)
class RoutingFingerprint:
    """What tells two routings apart, in plain numbers."""

    tokens: int
    top_k: int
    rows_sent: tuple[int, ...]
    """To each rank of the group."""
    tokens_per_expert: tuple[int, ...]
    """Of each local expert."""
    checksums: tuple[int, ...]
    """Of each rank's expert ids in order: equal counts with other tokens differ here, and on every rank."""

    def __str__(self) -> str:
        digest = " ".join(f"{checksum & 0xFFFFFFFF:08x}" for checksum in self.checksums)
        return (
            f"{self.tokens} tokens top {self.top_k}, rows sent {list(self.rows_sent)}, "
            f"tokens per expert {list(self.tokens_per_expert)}, expert ids [{digest}]"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class AllToAllExchange:
    """Implements `ac_moe.dispatch.base.Exchange` with `torch.distributed.all_to_all_single`."""

    group: dist.ProcessGroup | None
    order: torch.Tensor
    """int64 `[tokens * top_k]`: which slot of the flattened expert ids each sent row is for."""
    received: torch.Tensor
    """int64 `[ranks, local experts]`: rows that this rank gets, on the device."""
    send_splits: list[int]
    receive_splits: list[int]
    fingerprint: RoutingFingerprint
    collectives: int = 1

    @property
    def splits(self) -> tuple[int, ...]:
        return self.fingerprint.tokens_per_expert

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        return self.received.sum(0)

    def send(self, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[tokens, hidden]` to `[rows, hidden]`, and `[tokens, top_k]` to `[rows]`: each slot's value to its row."""
        return self.dispatch(tokens), self._to_experts(weights.reshape(-1).index_select(0, self.order))

    def send_back(
        self, rows: torch.Tensor, weights: torch.Tensor, needed: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The adjoint of `send`: a sum over each token's rows, and each row's value to its slot."""
        slots = (self.fingerprint.tokens, self.fingerprint.top_k)
        return (
            self.combine(rows) if needed[0] else None,
            self._to_slots(weights).view(slots) if needed[1] else None,
        )

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[tokens, ...]` to `[rows, ...]`: each token once for each of its experts."""
        return self._to_experts(tokens.index_select(0, self.order // self.fingerprint.top_k))

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to `[tokens, hidden]`, dtype of `rows`, summed in at least float32."""
        slots = self._to_slots(rows)
        per_token = slots.view(self.fingerprint.tokens, self.fingerprint.top_k, *rows.shape[1:])
        return per_token.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)

    def _to_experts(self, sent: torch.Tensor) -> torch.Tensor:
        rows = _all_to_all(sent, self.send_splits, self.receive_splits, self.group)
        return _transpose_blocks(rows, self.received)

    def _to_slots(self, rows: torch.Tensor) -> torch.Tensor:
        back = _transpose_blocks(rows, self.received.t())
        back = _all_to_all(back, self.receive_splits, self.send_splits, self.group)
        return torch.empty_like(back).index_copy_(0, self.order, back)


def plan(expert_ids: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None) -> AllToAllExchange:
    """Agrees with the group on who sends what. One collective, one wait for the device.

    Args:
        expert_ids: integer `[tokens, top_k]`, each in `[0, num_experts)`; `tokens` may differ between ranks.
        num_experts: of the whole group, a multiple of its size.
        group: the expert-parallel group, None for the default one.

    Raises:
        ValueError: on every rank, if an id of any rank is out of range.
    """
    tokens, top_k = expert_ids.shape
    ranks = dist.get_world_size(group)
    ids, order = torch.sort(expert_ids.reshape(-1).long(), stable=True)
    # Counted by where each expert begins: unlike bincount this neither waits for the device nor adds atomically.
    begins = torch.searchsorted(ids, torch.arange(num_experts + 1, device=ids.device))
    counts = begins.diff().view(ranks, -1)
    stray = ids.numel() - counts.sum()
    # The counts go with two numbers about this rank, so that every rank of the group knows both of every other, and
    # all raise alike where one alone would leave the others waiting in the next collective.
    about = torch.stack([routing_checksum(expert_ids, num_experts), stray]).expand(ranks, 2)
    header = torch.cat([counts, about], 1)
    answer = _all_to_all(header, [1] * ranks, [1] * ranks, group)
    mine, theirs = torch.stack([header, answer]).tolist()

    strays = {rank: row[-1] for rank, row in enumerate(theirs) if row[-1]}
    if strays:
        told = ", ".join(f"{count} on rank {rank}" for rank, count in strays.items())
        raise ValueError(f"expert_ids: must be in [0, {num_experts}); out of range in the group: {told}")
    send_splits = [sum(row[:-2]) for row in mine]
    by_source = [row[:-2] for row in theirs]
    return AllToAllExchange(
        group=group,
        order=order,
        received=answer[:, :-2],
        send_splits=send_splits,
        receive_splits=[sum(row) for row in by_source],
        fingerprint=RoutingFingerprint(
            tokens=tokens,
            top_k=top_k,
            rows_sent=tuple(send_splits),
            tokens_per_expert=tuple(sum(column) for column in zip(*by_source, strict=True)),
            checksums=tuple(row[-2] for row in theirs),
        ),
    )


def _all_to_all(
    sent: torch.Tensor, send_splits: list[int], receive_splits: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The only place that communicates. Counts are rows, by rank of the group."""
    received = sent.new_empty((sum(receive_splits), *sent.shape[1:]))
    dist.all_to_all_single(received, sent.contiguous(), receive_splits, send_splits, group=group)
    return received


def _transpose_blocks(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows in blocks ordered by (a, b), with `counts[a, b]` rows each, to blocks ordered by (b, a)."""
    if 1 in counts.shape:
        return rows
    lengths = counts.t().reshape(-1)
    starts = (counts.reshape(-1).cumsum(0).view_as(counts) - counts).t().reshape(-1)
    shift = starts - (lengths.cumsum(0) - lengths)
    index = torch.arange(rows.shape[0], device=rows.device)
    return rows.index_select(0, index + torch.repeat_interleave(shift, lengths, output_size=rows.shape[0]))
