import functools

import pytest
import torch
from ac_moe_local import (
    ENDS,
    HIDDEN,
    ROWS,
    WIDE,
    LocalLayer,
    Reversal,
    Run,
    direct,
    each,
    equal,
    gradients,
    inputs,
    layers,
    matrix_products,
    non_reentrant,
    reentrant,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ac_moe
from ac_moe.cache.combine import combine
from ac_moe.experts import down_projection, grouped_mm

KINDS = {
    "early stop": non_reentrant,
    "to the end": functools.partial(non_reentrant, early_stop=False),
    "reentrant": reentrant,
}
# A reentrant checkpoint in the forward of another is given an input without gradient there, and torch says so.
one_in_another = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def mm_in_backward(run: Run, dtype: torch.dtype, wide: int) -> int:
    model = layers(2, dtype, wide=wide)
    (x,) = inputs(1, dtype)
    loss = each(run, model)(x.requires_grad_()).float().sum()
    with matrix_products() as products:
        loss.backward()
    return products.count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "wide", "per_layer"),
    [(torch.float32, 8, 3), (torch.bfloat16, 8, 3), (torch.float64, 8, 2), (torch.float32, 7, 2)],
    ids=["fp32", "bf16", "fp64", "unaligned"],
)
def test_one_product_less_in_each_recompute(kind: str, dtype: torch.dtype, wide: int, per_layer: int) -> None:
    """torch's fallback multiplies for each of the 3 experts, ours for the 2 that have rows."""
    combine, tail = (mm_in_backward(KINDS[kind](mode), dtype, wide) for mode in ("combine", "moe_tail"))
    assert combine - tail == 2 * per_layer
    model, xs = layers(2, dtype, wide=wide), inputs(1, dtype)
    expected = gradients(model, each(direct, model), xs)
    assert equal(gradients(model, each(KINDS[kind]("moe_tail"), model), xs), expected)


def test_without_a_region_it_is_the_product() -> None:
    rows, weight = torch.randn(ROWS, WIDE), torch.randn(len(ENDS), WIDE, HIDDEN)
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    output = down_projection(rows, weight, offsets)
    assert type(output) is torch.Tensor
    assert torch.equal(output, grouped_mm(rows, weight, offsets))
    with pytest.raises(ValueError, match="offsets: torch.int64"):
        down_projection(rows, weight, offsets.long())


def test_what_the_recompute_makes() -> None:
    """torch's own node with the same three saved tensors, and a NaN of one element."""
    seen: list[tuple[object, ...]] = []

    def look(rows: torch.Tensor) -> torch.Tensor:
        seen.append((rows.grad_fn.name(), tuple(rows.shape), rows.dtype, rows.requires_grad, rows.stride(), repr(rows)))
        return rows

    model = layers(1)
    model[0].between = look
    x = inputs(1)[0].requires_grad_()
    packs = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packs.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    forward, recompute = ac_moe.context_fn("moe_tail")()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for context in (forward, recompute):
            packs.append(context)
            with context:
                model(x)
    half = packs.index(recompute)
    assert packs[1:half] == packs[half + 1 :]
    first, second = seen
    assert first[:4] == second[:4] == ("GroupedMmBackward0", (ROWS, HIDDEN), torch.float32, True)
    assert (first[4], second[4]) == ((HIDDEN, 1), (0, 0))
    assert "nan" in second[5]
    assert "nan" not in first[5]


class PaddedReversal(Reversal):
    """Two rows more than there are tokens, with anything in them, as a dispatcher with fixed sizes gives."""

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        assert torch.equal(rows[ROWS:], torch.zeros(2, HIDDEN))
        return rows[:ROWS].flip(0)

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([tokens.flip(0), torch.full((2, HIDDEN), float("nan"))])


class PaddedLayer(LocalLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.experts(torch.cat([x, torch.full((2, HIDDEN), float("nan"))]))
        return x + combine(rows, PaddedReversal(), self.site) * self.scale


def test_rows_left_over() -> None:
    model, padded, xs = layers(2), torch.nn.Sequential(PaddedLayer(), PaddedLayer()), inputs(2)
    padded.load_state_dict(model.state_dict())
    expected = gradients(model, each(direct, model), xs)
    for run in (direct, *(make("moe_tail") for make in KINDS.values())):
        assert equal(gradients(padded, each(run, padded), xs), expected)


@one_in_another
@pytest.mark.parametrize("outer", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("inner", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS], ids=" in ".join)
def test_nested_checkpoints_of_any_modes(outer: str, inner: str, kinds: tuple[str, str]) -> None:
    model, xs = layers(2), inputs(2)
    inside = each(KINDS[kinds[0]](inner), model)
    outside = KINDS[kinds[1]](outer)
    ac_moe.reset_stats()
    actual = gradients(model, lambda x: outside(inside, x), xs, "10")
    assert ac_moe.stats().live_entries == 0
    assert equal(actual, gradients(model, each(direct, model), xs, "10"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_whose_combine_is_outside_of_its_checkpoint_is_made_again(kind: str) -> None:
    """The region of the experts alone keeps nothing of combine: there is nothing to serve instead of the rows."""

    class Split(LocalLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = KINDS[kind]("moe_tail")(self.experts, x)
            return x + combine(rows, Reversal(), self.site) * self.scale

    model, split, xs = layers(2), torch.nn.Sequential(Split(), Split()), inputs(1)
    split.load_state_dict(model.state_dict())
    ac_moe.reset_stats()
    assert equal(gradients(split, split, xs), gradients(model, model, xs))
    assert ac_moe.stats() == ac_moe.Stats()


class CombineApart(LocalLayer):
    """With combine in a checkpoint of its own, inside of the block's."""

    def __init__(self) -> None:
        super().__init__()
        self.run = direct

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.run(self.tail, self.experts(x)).sin()

    def tail(self, rows: torch.Tensor) -> torch.Tensor:
        return combine(rows, Reversal(), self.site) * self.scale


@one_in_another
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("mode", ["combine", "moe_tail"])
def test_combine_in_a_checkpoint_of_its_own(mode: str, inner: str, outer: str) -> None:
    torch.manual_seed(0)
    layer, xs = CombineApart(), inputs(2)
    expected = gradients(layer, layer, xs, "10")
    layer.run = KINDS[inner](mode)
    assert equal(gradients(layer, functools.partial(KINDS[outer]("moe_tail"), layer), xs, "10"), expected)


@one_in_another
@pytest.mark.parametrize("inner", KINDS)
def test_combine_in_a_checkpoint_that_keeps_nothing(inner: str) -> None:
    """Its recompute would combine rows that were not made."""
    torch.manual_seed(0)
    layer, xs = CombineApart(), inputs(1)
    layer.run = KINDS[inner]("none")
    with pytest.raises(ac_moe.RecomputeCacheError, match="Put the down projection and combine into one checkpoint"):
        gradients(layer, functools.partial(reentrant("moe_tail"), layer), xs)
    # A non-reentrant one of two unpacks the rows as another tensor, so that it is not seen: NaN, then.
    actual = gradients(layer, functools.partial(non_reentrant("moe_tail", early_stop=False), layer), xs)
    layer.run = direct
    if inner == "reentrant":
        assert equal(actual, gradients(layer, layer, xs))
    else:
        assert any(gradient.isnan().all() for gradient in actual)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("op", ["_grouped_mm", "mm", "silu", "mul"])
@pytest.mark.parametrize("mode", ["combine", "moe_tail"])
def test_numbering_of_selective_policies(mode: str, op: str, every: int) -> None:
    """Policies count the calls of each operator: skipping one in the recompute must not shift the others."""
    watched = {"mul": torch.ops.aten.mul.Tensor}.get(op) or getattr(torch.ops.aten, op).default

    def contexts() -> object:
        seen = {False: 0, True: 0}

        def policy(ctx: object, func: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            if func is not watched:
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen[ctx.is_recompute] += 1
            return CheckpointPolicy.PREFER_RECOMPUTE if seen[ctx.is_recompute] % every else CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)

    model, xs = layers(3), inputs(2)
    for early_stop in (True, False):
        run = functools.partial(non_reentrant(mode, inner=contexts, early_stop=early_stop), model)
        assert equal(gradients(model, run, xs), gradients(model, each(direct, model), xs))
