"""On the reference buffer, which orders rows anew for each layout where a test does not say otherwise."""

import copy
import dataclasses
import functools
import gc
import pickle
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ac_moe_hybridep import (
    KINDS,
    SCHEDULES,
    JitteredBuffer,
    build_hybridep,
    checkpointed_as,
    communication,
    in_checkpoint,
)
from ac_moe_model import (
    EXPERTS,
    HIDDEN,
    TOKENS,
    Forward,
    GroupedLayer,
    batches,
    build,
    differences,
    gradients,
    loss_of,
    plain,
    recompute,
    same_bits,
    stats_at_rest,
)
from ac_moe_ranks import Ranks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ac_moe
from ac_moe.dispatch.hybridep import _buffers
from ac_moe.dispatch.hybridep_exchange import HybridEPExchange
from ac_moe.reference import HybridEPBuffer

LAYERS = 3

# ---- the contract of dispatch and combine


def order_of_rows(rank: int) -> dict[str, object]:
    """Three experts per rank; a token's value says where it comes from: rank, token. Blocks are padded to two."""
    dispatcher = ac_moe.HybridEPDispatcher(6, buffer=HybridEPBuffer, pad_multiple=2)
    count = (3, 2)[rank]
    tokens = torch.tensor([[100.0 * rank + token + 1] for token in range(count)])
    ids = torch.tensor([[[5, 0], [3, 0], [5, 4]], [[0, 3], [4, 5]]][rank])
    weights = (tokens + torch.tensor([0.25, 0.5])).bfloat16().requires_grad_()
    sent = dispatcher.dispatch(tokens, ids, weights)
    sent.weights.backward(sent.weights.detach() * 2)
    return {
        "rows": sent.rows[:, 0].tolist(),
        "weights": (sent.weights.dtype, sent.weights.tolist()),
        "tokens_per_expert": (sent.tokens_per_expert.dtype, sent.tokens_per_expert.tolist()),
        "splits": sent.splits,
        "back": dispatcher.combine(sent.rows, sent)[:, 0].tolist(),
        "to their slots": same_bits(weights.grad, weights.detach() * 2),
    }


def test_order_of_rows(ranks: Ranks) -> None:
    first, second = ranks.run(order_of_rows)
    assert first == {
        "rows": [1.0, 2.0, 101.0, 0.0],
        "weights": (torch.float32, [1.5, 2.5, 101.0, 0.0]),
        "tokens_per_expert": (torch.int64, [4, 0, 0]),
        "splits": [4, 0, 0],
        "back": [2.0, 4.0, 6.0],
        "to their slots": True,
    }
    assert second == {
        "rows": [2.0, 101.0, 3.0, 102.0, 1.0, 3.0, 102.0, 0.0],
        "weights": (torch.float32, [2.25, 101.5, 3.5, 102.0, 1.25, 3.25, 102.5, 0.0]),
        "tokens_per_expert": (torch.int64, [2, 2, 4]),
        "splits": [2, 2, 4],
        "back": [202.0, 204.0],
        "to their slots": True,
    }


def against_alltoall(rank: int, tokens: tuple[int, int], options: dict[str, int]) -> float:
    """Loss and gradients of the plain dispatcher, which is tested against a dense model. Scaled by its largest."""
    inputs = batches(2, tokens=tokens)
    actual = gradients(build_hybridep(2, buffer=HybridEPBuffer, **options), inputs, plain)
    expected = gradients(build(2), inputs, plain)
    assert actual.keys() == expected.keys()
    errors = [0.0]
    for name, wanted in expected.items():
        if wanted is not None and wanted.numel():
            errors.append(((actual[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item())
    return max(errors)


@pytest.mark.parametrize("options", [{}, {"pad_multiple": 4}, {"max_tokens_per_rank": 11}], ids=str)
@pytest.mark.parametrize("tokens", [(5, 8), (0, 3), (0, 0)], ids=str)
def test_equals_the_plain_dispatcher(ranks: Ranks, tokens: tuple[int, int], options: dict[str, int]) -> None:
    assert max(ranks.run(against_alltoall, tokens=tokens, options=options)) < 1e-5


def frozen(rank: int) -> list[bool]:
    """Only what needs a gradient gets one, and says so to the experts."""
    dispatcher = ac_moe.HybridEPDispatcher(EXPERTS, buffer=HybridEPBuffer)
    ids = torch.rand(4, EXPERTS).topk(2).indices
    seen = []
    for for_tokens, for_weights in ((True, False), (False, True)):
        tokens = torch.randn(4, HIDDEN, requires_grad=for_tokens)
        weights = torch.rand(4, 2, requires_grad=for_weights)
        sent = dispatcher.dispatch(tokens, ids, weights)
        seen += [sent.rows.requires_grad is for_tokens, sent.weights.requires_grad is for_weights]
        (sent.rows.sum() + sent.weights.sum()).backward()
        wanted = [2.0 if for_tokens else None, 1.0 if for_weights else None]
        seen += [
            grad is None if want is None else bool((grad == want).all())
            for grad, want in zip((tokens.grad, weights.grad), wanted, strict=True)
        ]
    return seen


def test_frozen_inputs(ranks: Ranks) -> None:
    assert ranks.run(frozen) == [[True] * 8] * 2


# ---- gradients, bit for bit


@dataclasses.dataclass(frozen=True)
class Case:
    form: str
    dtype: torch.dtype
    schedule: str
    tokens: tuple[int, int] = TOKENS
    pad_multiple: int | None = None


CASES = {
    "mul-fp32-1f1b": Case("mul", torch.float32, "1f1b"),
    "add-bf16-any": Case("add", torch.bfloat16, "any", pad_multiple=8),
    "no-tokens-lifo": Case("mul", torch.float32, "lifo", (0, 6), pad_multiple=4),
}


def of_case(name: str, forward: Forward) -> dict[str, torch.Tensor]:
    """Gradients. The layouts are one for each forward of a layer, and none is made in a recompute."""
    case = CASES[name]
    model = build_hybridep(LAYERS, case.form, case.dtype, grouped=True, pad_multiple=case.pad_multiple)
    JitteredBuffer.restart()
    result = gradients(model, batches(4, case.dtype, case.tokens), forward, SCHEDULES[case.schedule])
    assert JitteredBuffer.layouts == 4 * LAYERS
    return result


@functools.cache  # the same for all kinds and modes, whose jobs run in one process
def of_case_without_checkpointing(name: str) -> dict[str, torch.Tensor]:
    return of_case(name, plain)


def exact(rank: int, kind: str, mode: str, name: str) -> list[str]:
    expected = of_case_without_checkpointing(name)
    actual = of_case(name, checkpointed_as(kind, mode))
    stats = stats_at_rest()
    assert stats.live_entries == stats.live_pinned == 0
    return differences(actual, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(ranks: Ranks, kind: str, mode: str, name: str) -> None:
    assert ranks.run(exact, kind=kind, mode=mode, name=name) == [[], []]


def fresh_layout(rank: int) -> list[str]:
    model, inputs = build_hybridep(LAYERS), batches(1)
    JitteredBuffer.restart()
    actual = gradients(model, inputs, checkpointed_as("to the end", "none", pin_routing=False))
    JitteredBuffer.restart()
    return differences(actual, gradients(model, inputs, plain))


def test_without_a_context_a_new_order_of_rows_gives_wrong_gradients(ranks: Ranks) -> None:
    """The buffer of these tests does what they are about, and the README says what helps."""
    assert all("input 0" in names for names in ranks.run(fresh_layout))


def to_one_rank(rank: int, first: int, kind: str, mode: str) -> list[str]:
    """Every token goes to the experts of one rank; the other rank's experts have none."""

    def route(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax(torch.nn.functional.linear(x, layer.router), -1)[:, first : first + EXPERTS // 2]
        weights, ids = scores.topk(2, -1)
        return ids + first, weights

    model, inputs = build_hybridep(2, dtype=torch.bfloat16, grouped=True), batches(1, torch.bfloat16)
    for layer in model:
        layer.route = functools.partial(route, layer)
    JitteredBuffer.restart()
    actual = gradients(model, inputs, checkpointed_as(kind, mode))
    JitteredBuffer.restart()
    return differences(actual, gradients(model, inputs, plain))


@pytest.mark.parametrize("mode", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, EXPERTS // 2])
def test_a_rank_whose_experts_get_no_token_trains(ranks: Ranks, first: int, kind: str, mode: str) -> None:
    assert ranks.run(to_one_rank, first=first, kind=kind, mode=mode) == [[], []]


def twice(rank: int, kind: str) -> list[str]:
    """Two backwards through one graph, and a checkpoint inside of another."""
    model, (x,) = build_hybridep(2), batches(1)

    def run(forward: object) -> dict[str, torch.Tensor]:
        JitteredBuffer.restart()
        model.zero_grad()
        y = x.detach().clone().requires_grad_()
        loss = loss_of(forward(model, y))
        loss.backward(retain_graph=True)
        loss.backward()
        return {"x": y.grad} | {name: p.grad.clone() for name, p in model.named_parameters()}

    def nested(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return in_checkpoint(functools.partial(checkpointed_as(kind, "combine"), model), x, kind, "combine")

    expected = run(plain)
    return differences(run(checkpointed_as(kind, "combine")), expected) + differences(run(nested), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_twice_and_nested(ranks: Ranks, kind: str) -> None:
    assert ranks.run(twice, kind=kind) == [[], []]


class Stateful(GroupedLayer):
    """Ids of another dtype, pinned logits and counters: operators of ac-moe's own in only one of the phases."""

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with ac_moe.routing.counted_once(self):
            ids, weights = super().route(x)
            self.load.add_(torch.nn.functional.one_hot(ids, EXPERTS).sum((0, 1)))
        return ac_moe.routing.pin(ac_moe.routing.site_of(self), ids.int()), weights.clone()


def every_second(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Keeps every second call of each operator that can be kept, so that a call of ac-moe's own would show."""
    every_second.calls[operator] += 1
    kept = operator in KEPT and every_second.calls[operator] % 2 == 1
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


KEPT = {getattr(torch.ops.aten, name).default for name in ("mm", "clone", "_to_copy", "silu", "_softmax")}


def selective(rank: int, mode: str) -> list[str]:
    model, inputs = build_hybridep(2, grouped=True), batches(1)
    for layer in model:
        layer.__class__ = Stateful
        layer.register_buffer("load", torch.zeros(EXPERTS, dtype=torch.long))

    def forward(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        every_second.calls = Counter()
        inner = functools.partial(create_selective_checkpoint_contexts, every_second)
        return recompute(functools.partial(plain, model), x, mode, inner=inner, early_stop=False)

    JitteredBuffer.restart()
    actual = gradients(model, inputs, forward)
    assert all(every_second.calls[operator] for operator in KEPT)
    JitteredBuffer.restart()
    return differences(actual, gradients(model, inputs, plain))


@pytest.mark.parametrize("mode", ["combine", "moe_tail"])
def test_with_a_selective_policy(ranks: Ranks, mode: str) -> None:
    assert ranks.run(selective, mode=mode) == [[], []]


# ---- what the recompute communicates


def recomputed(rank: int, kind: str, mode: str | None, form: str) -> dict[str, int]:
    """Collectives of one backward of three layers, by name."""
    model, (x,) = build_hybridep(LAYERS, form, grouped=True), batches(1)
    loss = loss_of(plain(model, x) if mode is None else checkpointed_as(kind, mode)(model, x))
    with communication() as calls:
        loss.backward()
    return calls


@pytest.mark.parametrize("mode", ["combine", "moe_tail"])
@pytest.mark.parametrize(("kind", "form"), [("early stop", "mul"), ("to the end", "add"), ("reentrant", "mul")])
def test_one_barrier_and_one_all_to_all_fewer_per_layer(ranks: Ranks, kind: str, form: str, mode: str) -> None:
    counts = {which: ranks.run(recomputed, kind=kind, mode=which, form=form)[0] for which in (None, "none", mode)}
    recompute = {which: calls - counts[None] for which, calls in counts.items() if which is not None}
    # Rows, weights, combine; a number to agree on the routing; and no layout.
    assert recompute["none"] == {"all_to_all_single": 3 * LAYERS, "barrier": LAYERS, "all_reduce": LAYERS}
    assert recompute[mode] == {"all_to_all_single": 2 * LAYERS, "all_reduce": LAYERS}


def skipped(rank: int) -> tuple[int, int]:
    model, (x,) = build_hybridep(LAYERS), batches(1)
    ac_moe.reset_stats()
    loss_of(checkpointed_as("early stop", "combine")(model, x)).backward()
    return ac_moe.stats().served, ac_moe.stats().collectives_skipped


def test_stats(ranks: Ranks) -> None:
    assert ranks.run(skipped) == [(LAYERS, 2 * LAYERS)] * 2


# ---- what stays


def left(rank: int, kind: str, mode: str) -> dict[str, int]:
    """Alive after a backward while the loss is held, and the buffers once nobody uses them."""
    model, (x,) = build_hybridep(LAYERS, grouped=True), batches(1)
    x = x * 1  # a non-leaf, as between two blocks
    seen = weakref.ref(x)
    loss = loss_of(checkpointed_as(kind, mode)(model, x))
    loss.backward()
    del x
    held = {"input": int(seen() is not None), "buffers": len(_buffers)}
    gc.collect()
    held["exchanges"] = sum(type(o) is HybridEPExchange for o in gc.get_objects())
    held |= {"kept": ac_moe.stats().live_entries, "pinned": ac_moe.stats().live_pinned}
    del loss, model  # a reentrant checkpoint's node holds its block
    gc.collect()
    return held | {"buffers after": len(_buffers)}


@pytest.mark.parametrize("mode", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_the_backward(ranks: Ranks, kind: str, mode: str) -> None:
    expected = {"input": 0, "exchanges": 0, "kept": 0, "pinned": 0, "buffers": 1, "buffers after": 0}
    assert ranks.run(left, kind=kind, mode=mode) == [expected] * 2


def second(rank: int) -> str:
    dispatcher = ac_moe.HybridEPDispatcher(EXPERTS, buffer=HybridEPBuffer)
    tokens = torch.randn(4, HIDDEN, requires_grad=True)
    sent = dispatcher.dispatch(tokens, torch.rand(4, EXPERTS).topk(2).indices, torch.rand(4, 2))
    loss = sent.rows.sum()
    loss.backward()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


def test_second_backward(ranks: Ranks) -> None:
    for text in ranks.run(second):
        assert "a second time" in text
        assert "retain_graph=True" in text


def copies(rank: int) -> dict[str, object]:
    dispatcher = ac_moe.HybridEPDispatcher(EXPERTS, buffer=HybridEPBuffer, name="layers.0.moe", pad_multiple=2)
    tokens, ids, weights = torch.randn(4, HIDDEN), torch.rand(4, EXPERTS).topk(2).indices, torch.rand(4, 2)
    sent = dispatcher.dispatch(tokens, ids, weights)
    told = {}
    for name, other in (("deep", copy.deepcopy(dispatcher)), ("pickled", pickle.loads(pickle.dumps(dispatcher)))):
        told[name] = torch.equal(other.dispatch(tokens, ids, weights).rows, sent.rows)
        told[f"{name} site"] = other._site is not dispatcher._site and str(other._site) == "layers.0.moe"
    told["one buffer"] = len(_buffers)
    made = ac_moe.HybridEPDispatcher(EXPERTS, buffer=HybridEPBuffer(dist.group.WORLD, HIDDEN, 8, EXPERTS // 2))
    with pytest.raises(TypeError, match="cannot be pickled: its buffer is a connection") as caught:
        pickle.dumps(made)
    del caught
    told["made"] = torch.equal(made.dispatch(tokens, ids, weights).rows, sent.rows[sent.weights != 0])
    return told


def test_copies_and_buffers(ranks: Ranks) -> None:
    expected = dict.fromkeys(("deep", "deep site", "pickled", "pickled site", "made"), True) | {"one buffer": 1}
    assert ranks.run(copies) == [expected] * 2


# ---- routing that differs in the recompute


class Drifting(GroupedLayer):
    """Routes otherwise in the recompute: to other numbers of tokens per expert, or with two tokens exchanged."""

    drift, calls = "", 0

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        weights = super().route(x)[1]
        ids = (torch.arange(x.shape[0])[:, None] + torch.arange(2)) % EXPERTS
        if self.calls % 2 == 0 and dist.get_rank() == 1:
            if self.drift == "counts":
                ids = torch.tensor([0, 1]).expand_as(ids).clone()
            else:
                ids[[0, 1]] = ids[[1, 0]]
        return ids, weights


def drifting(rank: int, drift: str, kind: str, mode: str, check_routing: bool) -> dict[str, object]:
    form = "mul" if mode == "moe_tail" else "add"
    model, (x,) = build_hybridep(1, form, check_routing=check_routing), batches(1)
    (layer,) = model
    layer.__class__, layer.drift = Drifting, drift
    y = checkpointed_as(kind, mode)(model, x)
    try:
        loss_of(y).backward()
    except ac_moe.RecomputeRoutingMismatchError as error:
        return {"site": error.site, "ranks": error.ranks, "text": str(error), "tokens": error.forward.tokens}
    return {}


@pytest.mark.parametrize("mode", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("drift", "check_routing"), [("counts", False), ("counts", True), ("exchanged", True)])
def test_a_mismatch_is_raised_on_every_rank(
    ranks: Ranks, drift: str, check_routing: bool, kind: str, mode: str
) -> None:
    """Also where early stop ends the recompute before its combine (form `add`)."""
    for told in ranks.run(drifting, drift=drift, kind=kind, mode=mode, check_routing=check_routing):
        text = told.pop("text")
        assert text.startswith(
            "layers.0.moe: tokens are routed differently in the recompute than in the forward, on rank 1 of its group"
        )
        assert "forward:   8 tokens, rows per expert [4, 4, 4, 4]" in text
        assert ("checksum" in text) is check_routing
        assert told == {"site": "layers.0.moe", "ranks": (1,), "tokens": 8}


def test_without_the_checksum_only_counts_are_compared(ranks: Ranks) -> None:
    case = {"drift": "exchanged", "kind": "early stop", "mode": "combine", "check_routing": False}
    assert ranks.run(drifting, **case) == [{}, {}]


# ---- mistakes


def mistakes(rank: int) -> list[str]:
    make = functools.partial(ac_moe.HybridEPDispatcher, EXPERTS)
    dispatcher = make(buffer=HybridEPBuffer, max_tokens_per_rank=4)
    tokens, weights = torch.randn(4, HIDDEN), torch.rand(4, 2)
    ids = torch.tensor([[0, 1]]).expand(4, 2)
    kernels = make(buffer=type("HybridEPBuffer", (), {"__module__": "deep_ep.hybrid_ep_buffer"}))
    messages = []
    for call in (
        lambda: ac_moe.HybridEPDispatcher(0, buffer=HybridEPBuffer),
        lambda: make(buffer=HybridEPBuffer, pad_multiple=0),
        lambda: make(buffer=HybridEPBuffer, max_tokens_per_rank=1.5),
        lambda: make(buffer="hybridep"),
        lambda: dispatcher.dispatch(tokens, ids, weights.double()),
        lambda: dispatcher.dispatch(torch.randn(5, HIDDEN), torch.zeros(5, 1, dtype=torch.long), torch.rand(5, 1)),
        lambda: dispatcher.dispatch(tokens, ids + EXPERTS - 1, weights),
        lambda: dispatcher.dispatch(tokens, ids * 0, weights),
        lambda: kernels.dispatch(tokens, ids, weights),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        messages.append(f"{caught.type.__name__} {caught.value}")
    return messages


def test_mistakes(ranks: Ranks) -> None:
    expected = [
        "ValueError num_experts: 0 is not a positive integer",
        "ValueError pad_multiple: 0 is not a positive integer",
        "ValueError max_tokens_per_rank: 1.5 is not a positive integer",
        "TypeError buffer: 'hybridep' neither has",
        "ValueError weights: torch.float64; HybridEP carries float32",
        "ValueError tokens: 5 are more than max_tokens_per_rank=4",
        "ValueError expert_ids: must be in [0, 4); some on rank",
        "ValueError expert_ids: some token on rank",
        "ValueError tokens: torch.float32 on cpu; DeepEP's kernels take",
    ]
    for messages in ranks.run(mistakes):
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning)


def changed_in_place(rank: int) -> tuple[list[str], str]:
    """Gradients that differ where the caller changes its counts, and what is said where it changes its expert ids."""
    model, inputs = build_hybridep(1, grouped=True, buffer=HybridEPBuffer), batches(1)
    expected = gradients(model, inputs, plain)
    dispatch = model[0].dispatcher.dispatch

    def with_counts_changed(*arguments: torch.Tensor) -> ac_moe.Dispatched:
        sent = dispatch(*arguments)
        own = dataclasses.replace(sent, tokens_per_expert=sent.tokens_per_expert.clone())
        sent.tokens_per_expert.zero_()
        return own

    def with_ids_changed(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> ac_moe.Dispatched:
        ids = ids.clone()
        sent = dispatch(x, ids, weights)
        ids.zero_()
        return sent

    def run(changed: Callable) -> dict[str, torch.Tensor]:
        def forward(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
            model[0].dispatcher.dispatch = changed
            return checkpointed_as("early stop", "combine")(model, x)

        return gradients(model, inputs, forward)

    differing = differences(run(with_counts_changed), expected)
    try:
        run(with_ids_changed)
    except RuntimeError as error:
        return differing, str(error)
    return differing, "nothing"


def test_what_the_caller_changes_in_place(ranks: Ranks) -> None:
    for differing, said in ranks.run(changed_in_place):
        assert differing == []
        assert said.startswith("expert_ids were changed in place after they were given to dispatch")


def test_neither_deep_ep_nor_a_buffer() -> None:
    code = (
        "import ac_moe\n"
        "try:\n    ac_moe.HybridEPDispatcher(4)\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
        "with ac_moe.reference.install():\n"
        "    print(ac_moe.HybridEPDispatcher(4))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    message, shown = done.stdout.splitlines()
    assert message.startswith("buffer: None, and deep_ep.HybridEPBuffer cannot be imported")
    for remedy in ("hybrid-ep branch", "buffer=ac_moe.reference.HybridEPBuffer", "AllToAllDispatcher"):
        assert remedy in message
    assert shown.startswith("HybridEPDispatcher(num_experts=4")
