import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from ac_moe_model import EXPERTS, HIDDEN, TOKENS, batches, build, collectives, loss_of, plain, same_bits
from ac_moe_ranks import Ranks
from hypothesis import given
from hypothesis import strategies as st

import ac_moe
from ac_moe.cache.region import Site
from ac_moe.dispatch.alltoall_exchange import _transpose_blocks

# ---- against a dense reference


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """`x` of every rank; first dimensions may differ. No gradient."""
    sizes: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, x.detach())
    return sizes


def dense(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """The same model without a dispatcher: each expert of each rank on every token."""
    for layer in model:
        ids, weights = layer.route(x)
        y = torch.zeros_like(x)
        for expert in range(layer.dispatcher.num_experts):
            weight = (weights * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
            inner = torch.nn.functional.silu(x @ layer.all_gate[expert]) * (x @ layer.all_up[expert]) * weight
            y = y + inner @ layer.all_down[expert]
        x = x + y * layer.scale
    return x


def against_dense(rank: int, tokens: tuple[int, int], top_k: int, experts: int) -> list[float]:
    model = build(2, dtype=torch.float64, top_k=top_k, experts=experts)
    (x,) = batches(1, torch.float64, tokens)
    y = plain(model, x)
    loss_of(y).backward()
    reference, z = copy.deepcopy(model), x.detach().clone().requires_grad_()
    reference.zero_grad()
    for layer in reference:
        for name in ("gate", "up", "down"):
            whole = torch.cat(gathered(getattr(layer, name))).requires_grad_()
            setattr(layer, f"all_{name}", whole)
    expected = dense(reference, z)
    loss_of(expected).backward()
    errors = [(y - expected).abs().amax().item() if y.numel() else 0.0]
    errors.append((x.grad - z.grad).abs().amax().item() if y.numel() else 0.0)
    for layer, other in zip(model, reference, strict=True):
        errors.append((layer.router.grad - other.router.grad).abs().max().item())
        for name in ("gate", "up", "down"):
            whole = getattr(other, f"all_{name}").grad
            whole = torch.zeros_like(getattr(other, f"all_{name}")) if whole is None else whole
            dist.all_reduce(whole)  # tokens of every rank use the expert
            local = layer.dispatcher.local_experts
            errors.append((getattr(layer, name).grad - whole[local.start : local.stop]).abs().max().item())
    return errors


@pytest.mark.parametrize(("top_k", "experts"), [(1, 2), (2, 4), (3, 6)])
@pytest.mark.parametrize("tokens", [(5, 8), (0, 3), (1, 1)], ids=str)
def test_equals_a_dense_model(ranks: Ranks, tokens: tuple[int, int], top_k: int, experts: int) -> None:
    for errors in ranks.run(against_dense, tokens=tokens, top_k=top_k, experts=experts):
        assert max(errors) < 1e-4  # gradients up to 1e3, router scores in float32


# ---- the contract of dispatch and combine


def order_of_rows(rank: int) -> dict[str, object]:
    """Three experts per rank; a token's value says where it comes from: rank, token."""
    dispatcher = ac_moe.AllToAllDispatcher(6)
    count = (3, 2)[rank]
    tokens = torch.tensor([[100.0 * rank + token] for token in range(count)])
    ids = torch.tensor([[[5, 0], [3, 0], [5, 4]], [[0, 3], [5, 5]]][rank])
    weights = tokens + torch.tensor([0.1, 0.2])
    sent = dispatcher.dispatch(tokens, ids, weights)
    return {
        "experts": list(dispatcher.local_experts),
        "rows": sent.rows[:, 0].tolist(),
        "weights": [round(weight, 1) for weight in sent.weights.tolist()],
        "tokens_per_expert": (sent.tokens_per_expert.dtype, sent.tokens_per_expert.tolist()),
        "splits": sent.splits,
        "back": dispatcher.combine(sent.rows, sent)[:, 0].tolist(),
    }


def test_order_of_rows(ranks: Ranks) -> None:
    first, second = ranks.run(order_of_rows)
    assert first == {
        "experts": [0, 1, 2],
        "rows": [0.0, 1.0, 100.0],
        "weights": [0.2, 1.2, 100.1],
        "tokens_per_expert": (torch.int64, [3, 0, 0]),
        "splits": [3, 0, 0],
        "back": [0.0, 2.0, 4.0],
    }
    assert second == {
        "experts": [3, 4, 5],
        "rows": [1.0, 100.0, 2.0, 0.0, 2.0, 101.0, 101.0],
        "weights": [1.1, 100.2, 2.2, 0.1, 2.1, 101.1, 101.2],
        "tokens_per_expert": (torch.int64, [2, 1, 4]),
        "splits": [2, 1, 4],
        "back": [200.0, 202.0],
    }


def sums_in_float32(rank: int) -> list[bool]:
    dispatcher = ac_moe.AllToAllDispatcher(16)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(4, 8, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(16, generator=generator) for _ in range(4)])
    sent = dispatcher.dispatch(tokens, ids, torch.ones(4, 16))
    back = dispatcher.combine((sent.rows.float() * 1.01).bfloat16(), sent)
    expected = ((tokens.float() * 1.01).bfloat16().float() * 16).bfloat16()
    return [back.dtype is torch.bfloat16, torch.equal(back, expected), sent.weights.dtype is torch.float32]


def test_sums_in_float32(ranks: Ranks) -> None:
    assert ranks.run(sums_in_float32) == [[True] * 3] * 2


def adjoint(rank: int) -> list[bool]:
    """The backward of combine is dispatch, that of dispatch is combine, and weights return to their slots."""
    dispatcher = ac_moe.AllToAllDispatcher(EXPERTS)
    tokens = torch.randn(TOKENS[rank], HIDDEN, requires_grad=True)
    ids = torch.rand(TOKENS[rank], EXPERTS).topk(2).indices
    weights = torch.rand(TOKENS[rank], 2, requires_grad=True)
    sent = dispatcher.dispatch(tokens, ids, weights)
    rows = torch.randn_like(sent.rows).requires_grad_()
    grad = torch.randn_like(tokens)
    dispatcher.combine(rows, sent).backward(grad)
    checks = [same_bits(rows.grad, dispatcher.dispatch(grad, ids, weights).rows.detach())]
    grad_rows, grad_weights = torch.randn_like(sent.rows), sent.weights.detach() * 2
    torch.autograd.backward([sent.rows, sent.weights], [grad_rows, grad_weights])
    checks.append(same_bits(tokens.grad, dispatcher.combine(grad_rows, sent)))
    checks.append(same_bits(weights.grad, weights.detach() * 2))
    return checks


def test_backward_is_the_adjoint(ranks: Ranks) -> None:
    assert ranks.run(adjoint) == [[True] * 3] * 2


def frozen(rank: int) -> tuple[int, bool, bool]:
    """Only what needs a gradient is sent back."""
    dispatcher = ac_moe.AllToAllDispatcher(EXPERTS)
    tokens = torch.randn(TOKENS[rank], HIDDEN, requires_grad=True)
    sent = dispatcher.dispatch(tokens, torch.zeros(TOKENS[rank], 1, dtype=torch.int32), torch.ones(TOKENS[rank], 1))
    y = dispatcher.combine(sent.rows * sent.weights[:, None], sent)
    with collectives() as count:
        y.sum().backward()
    again = dispatcher.dispatch(tokens.detach(), torch.zeros(TOKENS[rank], 1).long(), torch.ones(TOKENS[rank], 1))
    assert not again.rows.requires_grad
    return count.value, torch.equal(tokens.grad, torch.ones_like(tokens)), sent.weights.requires_grad


def test_frozen_router_and_frozen_tokens(ranks: Ranks) -> None:
    assert ranks.run(frozen) == [(2, True, False)] * 2


def second_order(rank: int) -> str:
    dispatcher = ac_moe.AllToAllDispatcher(EXPERTS)
    tokens = torch.randn(3, HIDDEN, requires_grad=True)
    sent = dispatcher.dispatch(tokens, torch.zeros(3, 1).long(), torch.ones(3, 1))
    (grad,) = torch.autograd.grad((dispatcher.combine(sent.rows, sent) ** 2).sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        grad.sum().backward()
    return str(caught.value)


def test_second_order_gradients_are_refused(ranks: Ranks) -> None:
    assert "once_differentiable" in ranks.run(second_order)[0]


# ---- what is refused


@pytest.mark.parametrize("number", [0, -1, 2.0, "4"])
def test_number_of_experts(number: object) -> None:
    with pytest.raises(ValueError, match="num_experts: .* is not a positive integer"):
        ac_moe.AllToAllDispatcher(number)


@pytest.mark.parametrize("group", ["ep", 0, object()])
def test_what_is_no_group(group: object) -> None:
    with pytest.raises(TypeError, match=r"group: \w+ is not a ProcessGroup; of a mesh, give mesh.get_group\(\)"):
        ac_moe.AllToAllDispatcher(4, group)


def test_what_is_no_tensor() -> None:
    dispatcher = ac_moe.AllToAllDispatcher(4)
    tokens, ids = torch.zeros(2, 3), torch.zeros(2, 1).long()
    with pytest.raises(TypeError, match="weights: NoneType is not a tensor"):
        dispatcher.dispatch(tokens, ids, None)
    with pytest.raises(TypeError, match="expert_ids: list is not a tensor"):
        dispatcher.dispatch(tokens, [[0], [1]], torch.ones(2, 1))


def test_combine_of_what_was_not_dispatched() -> None:
    with pytest.raises(TypeError, match=r"dispatched: Tensor is not what dispatch returned; .*\(rows, dispatched\)"):
        ac_moe.AllToAllDispatcher(4).combine(torch.zeros(2, 3), torch.zeros(2, 3))


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        ac_moe.AllToAllDispatcher(4).dispatch(torch.zeros(1, 2), torch.zeros(1, 1).long(), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("tokens", "ids", "weights", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 1).long(), torch.ones(2, 1), r"tokens: torch.float32 \[2, 3, 4\]"),
        (torch.zeros(2, 3).long(), torch.zeros(2, 1).long(), torch.ones(2, 1), r"tokens: torch.int64 \[2, 3\]"),
        (torch.zeros(2, 3), torch.zeros(3, 1).long(), torch.ones(3, 1), r"expert_ids: torch.int64 \[3, 1\]"),
        (torch.zeros(2, 3), torch.zeros(2, 0).long(), torch.ones(2, 0), r"expert_ids: .* top_k >= 1"),
        (torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 1), r"expert_ids: torch.float32 \[2, 1\]"),
        (torch.zeros(2, 3), torch.zeros(2, 1).bool(), torch.ones(2, 1), r"expert_ids: torch.bool \[2, 1\]"),
        (torch.zeros(2, 3), torch.zeros(2, 1).long(), torch.ones(2), r"weights: .* expected floating \[2, 1\]"),
        (torch.zeros(2, 3), torch.zeros(2, 1).long(), torch.ones(2, 1, device="meta"), "must be on one device"),
    ],
)
def test_inputs_that_do_not_fit(tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ac_moe.AllToAllDispatcher(4).dispatch(tokens, ids, weights)


def refused(rank: int) -> list[str]:
    def message(action: object) -> str:
        with pytest.raises(ValueError, match=": ") as caught:
            action()
        return str(caught.value)

    tokens, ids, weights = torch.zeros(2, 3), torch.zeros(2, 1).long(), torch.ones(2, 1)
    dispatcher = ac_moe.AllToAllDispatcher(4)
    sent = dispatcher.dispatch(tokens, ids, weights)
    only_first = dist.new_group([0])
    messages = [
        message(lambda: ac_moe.AllToAllDispatcher(3).dispatch(tokens, ids, weights)),
        message(lambda: dispatcher.combine(sent.rows[1:] if rank == 0 else torch.zeros(1, 3), sent)),
        # Wrong on rank 1 only: rank 0 must not be left waiting for it.
        message(lambda: dispatcher.dispatch(tokens, ids + 4 * rank, weights)),
        message(lambda: dispatcher.dispatch(tokens, ids - rank, weights)),
    ]
    if rank == 1:
        messages.append(
            message(lambda: ac_moe.AllToAllDispatcher(4, only_first, name="moe").dispatch(tokens, ids, weights))
        )
    return messages


def test_refusals(ranks: Ranks) -> None:
    first, second = ranks.run(refused)
    assert first[0] == second[0]
    assert first[0].startswith("num_experts: 3 experts cannot be shared equally by the 2 ranks of the group")
    assert first[1] == "rows: shape [3, 3] does not fit; expected [4, hidden]"
    assert second[1] == "rows: shape [1, 3] does not fit; expected [0, hidden]"
    expected = "expert_ids: must be in [0, 4); out of range in the group: 2 on rank 1"
    assert first[2:] == [expected, expected]
    assert second[2:] == [expected, expected, "group: rank 1 is not in the expert-parallel group of moe"]


# ---- copies


def copies(rank: int) -> list[object]:
    model, (x,) = build(1), batches(1)
    group = dist.new_group([0, 1])
    model[0].dispatcher = ac_moe.AllToAllDispatcher(EXPERTS, group)
    expected = model[0](x)
    copied = copy.deepcopy(model)
    with pytest.raises(TypeError) as caught:
        pickle.dumps(model)
    model[0].dispatcher.group = None
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return [
        same_bits(copied[0](x), expected),
        same_bits(loaded[0](x), expected),
        copied[0].dispatcher.group is group,
        len({str(m[0].dispatcher._site) for m in (model, copied, loaded)}),
        list(model.state_dict()) == [f"0.{name}" for name in ("router", "scale", "gate", "up", "down")],
        str(caught.value),
    ]


def test_a_model_can_be_copied_and_pickled(ranks: Ranks) -> None:
    for *facts, message in ranks.run(copies):
        assert facts == [True, True, True, 3, True]
        assert "cannot be pickled: its process group is a connection of this process" in message


def test_repr() -> None:
    assert repr(ac_moe.AllToAllDispatcher(8, name="layers.0.moe")) == (
        "AllToAllDispatcher(num_experts=8, name='layers.0.moe')"
    )
    assert isinstance(ac_moe.AllToAllDispatcher(8)._site, Site)


# ---- layout, without ranks


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_transposing_blocks(counts: list[list[int]]) -> None:
    blocks = {(a, b): [(a, b, i) for i in range(n)] for a, row in enumerate(counts) for b, n in enumerate(row)}
    rows = torch.tensor([row for key in sorted(blocks) for row in blocks[key]], dtype=torch.long).reshape(-1, 3)
    expected = [list(row) for key in sorted(blocks, key=lambda key: key[::-1]) for row in blocks[key]]
    moved = _transpose_blocks(rows, torch.tensor(counts))
    assert moved.tolist() == expected
    assert torch.equal(_transpose_blocks(moved, torch.tensor(counts).t()), rows)
