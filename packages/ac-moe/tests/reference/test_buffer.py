import inspect

import pytest
import torch
import torch.distributed as dist
from ac_moe_ranks import Ranks

from ac_moe.reference import HybridEPBuffer

EXPERTS, HIDDEN = 6, 8  # three experts per rank


def buffer() -> HybridEPBuffer:
    return HybridEPBuffer(dist.group.WORLD, HIDDEN, 64, EXPERTS // 2)


def routed(tokens: int, top_k: int = 2, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Tokens, a routing map and probabilities of this rank."""
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k, -1).indices
    routing_map = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter(1, ids, True)
    probs = torch.rand(tokens, EXPERTS, generator=generator) * routing_map
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype), routing_map, probs


def everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    whole: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(whole, tensor)
    return whole


# ---- rows ordered by expert


def permuted(rank: int, tokens: tuple[int, int], pad: int | None) -> list[bool]:
    """Against the definition, token by token, from what every rank gathers."""
    hidden, routing_map, probs = routed(tokens[rank])
    rows, row_probs, scaling, counts, handle = buffer().dispatch_with_permute(
        hidden=hidden, routing_map=routing_map, probs=probs, num_of_experts_per_rank=3, pad_multiple=pad
    )
    expected_rows, expected_probs, expected_counts = [], [], []
    sources = list(zip(everyones(hidden), everyones(routing_map), everyones(probs), strict=True))
    for expert in range(rank * 3, rank * 3 + 3):
        block = [(x, p[expert]) for xs, maps, ps in sources for x, m, p in zip(xs, maps, ps, strict=True) if m[expert]]
        block += [(torch.zeros(HIDDEN), torch.zeros(()))] * (-len(block) % (pad or 1))
        expected_rows += [x for x, _ in block]
        expected_probs += [p for _, p in block]
        expected_counts.append(len(block))
    return [
        rows.tolist() == [x.tolist() for x in expected_rows],
        row_probs.tolist() == [p.item() for p in expected_probs],
        row_probs.dtype is torch.float32,
        scaling is None,
        counts.tolist() == expected_counts,
        counts.dtype is torch.int64,
        len(handle) == 11,
        handle[8] == tokens[rank],
    ]


@pytest.mark.parametrize("pad", [None, 4])
@pytest.mark.parametrize("tokens", [(5, 8), (0, 3), (0, 0)], ids=str)
def test_rows_are_ordered_by_expert_source_and_token(ranks: Ranks, tokens: tuple[int, int], pad: int | None) -> None:
    assert ranks.run(permuted, tokens=tokens, pad=pad) == [[True] * 8] * 2


def round_trip(rank: int, pad: int | None, dtype: torch.dtype) -> list[bool]:
    """Experts that double: every token comes back as 2 * top_k times itself, every probability to its place."""
    hidden, routing_map, probs = routed((5, 8)[rank], 2, dtype)
    ep = buffer()
    rows, row_probs, _, _, handle = ep.dispatch_with_permute(
        hidden=hidden, routing_map=routing_map, probs=probs, pad_multiple=pad
    )
    back, back_probs = ep.combine_with_unpermute(hidden=rows * 2, probs=row_probs, handle=handle, pad_multiple=pad)
    alone, nothing = ep.combine_with_unpermute(hidden=rows * 2, handle=handle, pad_multiple=pad)
    return [torch.equal(back, hidden * 4), torch.equal(back_probs, probs), torch.equal(alone, back), nothing is None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("pad", [None, 4])
def test_combine_is_an_unweighted_sum(ranks: Ranks, pad: int | None, dtype: torch.dtype) -> None:
    assert ranks.run(round_trip, pad=pad, dtype=dtype) == [[True] * 4] * 2


def sums_in_float32(rank: int) -> float:
    """256 + 1 + 1 of one rank's experts: bfloat16 would lose each of the ones, their sum in float32 survives."""
    ep = buffer()
    hidden, routing_map = torch.zeros(1, HIDDEN, dtype=torch.bfloat16), torch.zeros(1, EXPERTS, dtype=torch.bool)
    routing_map[:, :3] = True
    rows, _, _, counts, handle = ep.dispatch_with_permute(hidden=hidden, routing_map=routing_map)
    values = torch.tensor([256.0, 1.0, 1.0]).repeat_interleave(counts if rank == 0 else torch.zeros(3, dtype=int))
    rows = rows + values.to(rows.dtype)[:, None]
    return ep.combine_with_unpermute(hidden=rows, handle=handle)[0][0, 0].item()


def test_sums_in_float32(ranks: Ranks) -> None:
    assert ranks.run(sums_in_float32) == [258.0, 258.0]


def gradients(rank: int, pad: int | None) -> float:
    """combine(experts(dispatch)) with its adjoints as backward, against one process with every expert."""
    hidden, routing_map, probs = (tensor.clone() for tensor in routed((5, 8)[rank]))
    everything = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights = everything[rank * 3 : rank * 3 + 3].clone().requires_grad_()
    ep = buffer()
    rows, row_probs, _, counts, handle = ep.dispatch_with_permute(
        hidden=hidden, routing_map=routing_map, probs=probs, pad_multiple=pad
    )
    rows.requires_grad_()
    row_probs.requires_grad_()
    blocks = zip(weights, rows.split(counts.tolist()), row_probs.split(counts.tolist()), strict=True)
    out = torch.cat([torch.tanh(x @ weight) * p[:, None] for weight, x, p in blocks])
    combined, _ = ep.combine_with_unpermute(hidden=out.detach(), handle=handle, pad_multiple=pad)
    grad = combined.cos()
    grad_rows = ep.dispatch_with_permute(
        hidden=grad, handle=handle, pad_multiple=pad, num_permuted_tokens=torch.tensor(rows.shape[0])
    )[0]
    out.backward(grad_rows)
    grad_hidden, grad_probs = ep.combine_with_unpermute(
        hidden=rows.grad, probs=row_probs.grad, handle=handle, pad_multiple=pad
    )

    x, p, w = (tensor.detach().clone().requires_grad_() for tensor in (hidden, probs, everything))
    dense = sum(torch.tanh(x @ w[expert]) * p[:, expert, None] for expert in range(EXPERTS))
    dense.sin().sum().backward()
    dist.all_reduce(w.grad)
    wanted = [dense, x.grad, p.grad * routing_map, w.grad[rank * 3 : rank * 3 + 3]]
    got = [combined, grad_hidden, grad_probs, weights.grad]
    return max((a - b).abs().max().item() for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("pad", [None, 4])
def test_gradients_are_those_of_one_process(ranks: Ranks, pad: int | None) -> None:
    assert max(ranks.run(gradients, pad=pad)) < 1e-5


def rows_asked_for(rank: int) -> dict[str, object]:
    ep = buffer()
    hidden, routing_map, _ = routed(4)
    exact, _, _, counts, handle = ep.dispatch_with_permute(hidden=hidden, routing_map=routing_map)
    need = exact.shape[0]
    more, _, _, _, roomy = ep.dispatch_with_permute(
        hidden=hidden, routing_map=routing_map, num_permuted_tokens=need + 3, non_blocking=True
    )
    fewer, _, _, _, tight = ep.dispatch_with_permute(
        hidden=hidden, routing_map=routing_map, num_permuted_tokens=need - 1
    )
    again, _, _, counts_again, same = ep.dispatch_with_permute(
        hidden=hidden, handle=handle, num_permuted_tokens=torch.tensor(need)
    )
    return {
        "all": int(counts.sum()) == need,
        "more": torch.equal(more[:need], exact) and bool(more[need:].isnan().all()) and len(more) == need + 3,
        "fewer": torch.equal(fewer, exact[: need - 1]),
        "overflow": [handle[10].item(), roomy[10].item(), tight[10].item()],
        "again": torch.equal(again, exact) and counts_again is None and same is handle,
    }


def test_number_of_rows(ranks: Ranks) -> None:
    expected = {"all": True, "more": True, "fewer": True, "overflow": [0, 0, 1], "again": True}
    assert ranks.run(rows_asked_for) == [expected] * 2


def counted(rank: int) -> list[list[str]]:
    """What is communicated, by name."""
    calls: list[str] = []
    originals = {name: getattr(dist, name) for name in ("all_gather", "all_to_all_single", "barrier")}

    def counting(name: str) -> object:
        return lambda *args, **kwargs: (calls.append(name), originals[name](*args, **kwargs))[1]

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        ep, (hidden, routing_map, probs) = buffer(), routed(4)
        rows, _, _, _, handle = ep.dispatch_with_permute(hidden=hidden, routing_map=routing_map, probs=probs)
        told = [calls.copy()]
        calls.clear()
        ep.dispatch_with_permute(hidden=hidden, probs=probs, handle=handle, num_permuted_tokens=rows.shape[0])
        told.append(calls.copy())
        calls.clear()
        ep.combine_with_unpermute(hidden=rows, handle=handle)
        return [*told, calls]
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def test_a_handle_saves_the_layouts_collectives(ranks: Ranks) -> None:
    layout, rows = ["all_gather"] * 2, ["all_to_all_single"] * 2
    assert ranks.run(counted) == [[layout + rows, rows, ["barrier", "all_to_all_single"]]] * 2


# ---- one row per token and rank


def dense_dispatch(rank: int, tokens: tuple[int, int]) -> list[bool]:
    hidden, routing_map, probs = routed(tokens[rank], top_k=3)
    ep = buffer()
    rows, row_probs, _, handle = ep.dispatch(hidden, routing_map=routing_map, probs=probs)
    mine = slice(rank * 3, rank * 3 + 3)
    expected = [
        (x, p)
        for xs, maps, ps in zip(everyones(hidden), everyones(routing_map), everyones(probs), strict=True)
        for x, m, p in zip(xs, maps[:, mine].any(1), ps[:, mine], strict=True)
        if m
    ]
    back, back_probs = ep.combine(rows, row_probs, handle)
    ranks_of_token = routing_map.view(-1, 2, 3).any(-1).sum(-1, keepdim=True)
    return [
        rows.tolist() == [x.tolist() for x, _ in expected],
        row_probs[:, mine].tolist() == [p.tolist() for _, p in expected],
        torch.equal(back, hidden * ranks_of_token),
        torch.equal(back_probs, probs),
        len(handle) == 7,
    ]


@pytest.mark.parametrize("tokens", [(5, 8), (3, 0)], ids=str)
def test_without_permute(ranks: Ranks, tokens: tuple[int, int]) -> None:
    assert ranks.run(dense_dispatch, tokens=tokens) == [[True] * 5] * 2


def by_index(rank: int) -> list[bool]:
    """`topk_idx` and `topk_weights` are the same routing in another form."""
    ep, (hidden, routing_map, probs) = buffer(), routed(4)
    ids = routing_map.long().topk(2).indices
    weights = probs.gather(1, ids)
    rows, row_probs, *_ = ep.dispatch_with_permute(
        hidden=hidden, topk_idx=ids, topk_weights=weights, num_of_experts=EXPERTS
    )
    by_map, probs_by_map, *_ = ep.dispatch_with_permute(hidden=hidden, routing_map=routing_map, probs=probs)
    return [torch.equal(rows, by_map), torch.equal(row_probs, probs_by_map)]


def test_routing_by_index(ranks: Ranks) -> None:
    assert ranks.run(by_index) == [[True, True]] * 2


# ---- mistakes, before any communication


def mistakes(rank: int) -> list[str]:
    ep, (hidden, routing_map, probs) = buffer(), routed(4)
    *_, handle = ep.dispatch_with_permute(hidden=hidden, routing_map=routing_map)
    *_, dense_handle = ep.dispatch(hidden, routing_map=routing_map)
    wrong = [
        lambda: HybridEPBuffer(dist.group.WORLD, HIDDEN, 64, 3, use_fp8=True),
        lambda: ep.dispatch_with_permute(hidden=hidden, routing_map=routing_map, use_fp8=True),
        lambda: ep.dispatch_with_permute(hidden=hidden),
        lambda: ep.dispatch_with_permute(hidden=hidden, routing_map=routing_map.int()),
        lambda: ep.dispatch_with_permute(hidden=hidden[:3], routing_map=routing_map),
        lambda: ep.dispatch_with_permute(hidden=hidden, routing_map=routing_map[:, :4]),
        lambda: ep.dispatch_with_permute(hidden=hidden, routing_map=routing_map, non_blocking=True),
        lambda: ep.dispatch_with_permute(
            hidden=hidden, routing_map=routing_map, num_permuted_tokens=7, pad_multiple=4, non_blocking=True
        ),
        lambda: ep.dispatch_with_permute(hidden=hidden, handle=handle),
        lambda: ep.dispatch_with_permute(hidden=hidden[:3], handle=handle, num_permuted_tokens=8),
        lambda: ep.dispatch_with_permute(hidden=hidden, handle=dense_handle, num_permuted_tokens=8),
        lambda: ep.dispatch_with_permute(hidden=hidden, probs=probs.double(), handle=handle, num_permuted_tokens=8),
        lambda: ep.combine_with_unpermute(hidden=hidden),
    ]
    messages = []
    for call in wrong:
        with pytest.raises(ValueError, match=": ") as caught:
            call()
        messages.append(str(caught.value).partition(":")[0])
    return messages


def test_mistakes(ranks: Ranks) -> None:
    expected = ["use_fp8, scaling_factor"] * 2 + ["routing_map"] * 4 + ["num_permuted_tokens"] * 3
    expected += ["hidden", "handle", "probs", "handle"]
    assert ranks.run(mistakes) == [expected] * 2


# ---- what Megatron-core calls


def test_signature_fits_megatrons_calls() -> None:
    """The keywords that `megatron/core/transformer/moe/fused_a2a.py` (0.16) passes."""
    inspect.signature(HybridEPBuffer).bind(
        group=0,
        hidden_dim=0,
        max_num_of_tokens_per_rank=0,
        num_local_experts=0,
        use_fp8=False,
        num_sms_dispatch_api=24,
        num_sms_combine_api=24,
    )
    inspect.signature(HybridEPBuffer.dispatch_with_permute).bind(
        0,
        hidden=0,
        routing_map=0,
        probs=0,
        scaling_factor=None,
        num_of_experts_per_rank=0,
        pad_multiple=0,
        num_permuted_tokens=0,
        non_blocking=True,
    )
    inspect.signature(HybridEPBuffer.combine_with_unpermute).bind(0, hidden=0, probs=0, handle=0, pad_multiple=0)
