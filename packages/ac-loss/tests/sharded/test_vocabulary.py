"""A vocabulary sharded over two ranks, against the specification on one."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ac_loss import linear_cross_entropy
from ac_loss.backends.torch_backend import chunking
from ac_loss.reference import linear_cross_entropy as spec

WIDTH, SHAPE = 12, (3, 10)


def draw(vocab, dtype=torch.float64, ignored=0.3):
    generator = torch.Generator().manual_seed(5)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    labels = torch.randint(0, vocab, SHAPE, generator=generator)
    labels[torch.rand(SHAPE, generator=generator) < ignored] = -100
    return normal(*SHAPE, WIDTH), normal(vocab, WIDTH), normal(vocab), labels


def distance(got, right):
    return (got.double() - right.double()).abs().max().item() / max(right.double().abs().max().item(), 1e-30)


def truth(hidden, weight, bias, labels, *, upstream, options):
    leaves = [t.double().clone().requires_grad_() if t is not None else None for t in (hidden, weight, bias)]
    theirs = {k: v for k, v in options.items() if k != "grad_mode"}
    loss = spec(leaves[0], leaves[1], labels, leaves[2], **theirs)
    (loss * upstream).sum().backward()
    return loss.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)


def compute_nothing(rank):
    """Loss and gradients of an empty batch."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = distribute_tensor(torch.ones(5, WIDTH), mesh, [Shard(0)]).requires_grad_()
    hidden = torch.ones(0, WIDTH, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.ones(0, dtype=torch.int64))
    loss.backward()
    return loss.item(), weight.grad.full_tensor().abs().sum().item(), list(hidden.grad.shape)


def test_an_empty_batch(ranks):
    assert ranks.run(compute_nothing) == [(0.0, 0.0, [0, WIDTH])] * 2


def compare(rank, *, case, vocab, uneven=None, dtype=torch.float64, ignored=0.3, lying="dtensor"):
    """The largest distance, relative to the largest entry, of the loss and the three gradients."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    options, with_bias = CASES[case]
    hidden, weight, bias, labels = draw(vocab, dtype, ignored)
    bias = bias if with_bias else None
    upstream = torch.linspace(-1, 2, labels.numel()).double().reshape(SHAPE) if options["reduction"] == "none" else 1.5
    right = truth(hidden, weight, bias, labels, upstream=upstream, options=options)

    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    start, stop = uneven[rank] if uneven else (rank * -(-vocab // 2), min(vocab, (rank + 1) * -(-vocab // 2)))
    group = None
    if lying.startswith("dtensor"):
        weight, bias = (None if t is None else distribute_tensor(t, mesh, [Shard(0)]) for t in (weight, bias))
    else:
        weight, bias = (None if t is None else t[start:stop].clone() for t in (weight, bias))
        group = dist.group.WORLD
    if lying == "dtensor, replicated hidden":
        hidden = distribute_tensor(hidden, mesh, [Replicate()])
        labels = distribute_tensor(labels, mesh, [Replicate()])
    elif lying == "dtensor, sequence parallel":
        hidden = distribute_tensor(hidden, mesh, [Shard(1)])
    leaves = [None if t is None else t.requires_grad_() for t in (hidden, weight, bias)]
    with mock.patch.multiple(chunking, **SMALL):
        loss = linear_cross_entropy(hidden, weight, labels, bias, vocab_parallel_group=group, **options)
        (loss * upstream).sum().backward()

    got = [loss.detach()]
    for leaf in leaves:
        if isinstance(leaf, DTensor):
            assert leaf.grad.placements == leaf.placements
        got.append(None if leaf is None else leaf.grad)
    whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
    mine = lambda t, local: t if isinstance(local, DTensor) else t[start:stop]  # noqa: E731
    right = [*right[:2], mine(right[2], got[2]), None if bias is None else mine(right[3], got[3])]
    return max(distance(whole(g), r) for g, r in zip(got, right, strict=True) if r is not None)


OPTIONS = {
    "plain": ({}, False),
    "bias": ({}, True),
    "softcap and scale": ({"softcap": 1.5, "logit_scale": 0.6}, False),
    "smoothing": ({"label_smoothing": 0.2}, False),
    "z": ({"z_loss": 0.05}, False),
    "all": ({"softcap": 3.0, "logit_scale": 1.7, "label_smoothing": 0.1, "z_loss": 0.01}, True),
}
REDUCTIONS = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum", "num_label_tokens": 50},
    "none": {"reduction": "none"},
    "recompute": {"reduction": "mean", "grad_mode": "recompute"},
}
CASES = {
    f"{reduction}, {name}": (REDUCTIONS[reduction] | options, bias)
    for reduction, (name, (options, bias)) in itertools.product(REDUCTIONS, OPTIONS.items())
}
# Some chunks and tiles in these few tokens and classes.
SMALL = {"ROWS_WIDE": 7, "ROWS_NARROW": 7, "ROWS_FLOOR": 7}
SMALL |= {"TILE_ROWS": 8, "TILE_COLUMNS_FLOOR": 1, "TILE_COLUMNS_STEP": 5}
LYINGS = ("dtensor", "dtensor, replicated hidden", "dtensor, sequence parallel", "plain")


@pytest.mark.parametrize("case", CASES)
def test_equals_the_specification(ranks, case):
    assert max(ranks.run(compare, case=case, vocab=31, lying="plain")) < 1e-12


@pytest.mark.parametrize("lying", LYINGS)
@pytest.mark.parametrize("case", ["mean, all", "recompute, all"])
def test_ways_to_lie(ranks, case, lying):
    assert max(ranks.run(compare, case=case, vocab=31, lying=lying)) < 1e-12


@pytest.mark.parametrize("uneven", [((0, 1), (1, 31)), ((0, 28), (28, 31))])
@pytest.mark.parametrize("case", ["mean, all", "recompute, all"])
def test_shards_of_any_sizes(ranks, case, uneven):
    assert max(ranks.run(compare, case=case, vocab=31, lying="plain", uneven=uneven)) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.6e-2)])
def test_narrow_dtypes(ranks, dtype, tolerance):
    assert max(ranks.run(compare, case="mean, all", vocab=31, dtype=dtype)) < tolerance


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_counts(ranks, reduction):
    assert max(ranks.run(compare, case=f"{reduction}, all", vocab=31, ignored=1.1)) == 0.0


# Collectives ---------------------------------------------------------------------------------------------------------


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def count(rank, **options):
    hidden, weight, bias, labels = draw(31, ignored=0.0)  # 30 tokens: 5 chunks of 6
    mine = slice(0, 16) if rank == 0 else slice(16, 31)
    leaves = hidden.requires_grad_(), weight[mine].requires_grad_(), bias[mine].requires_grad_()
    with mock.patch.multiple(chunking, **SMALL):
        with Counter() as forward:
            loss = linear_cross_entropy(
                *leaves[:2], labels, leaves[2], z_loss=0.1, vocab_parallel_group=dist.group.WORLD, **options
            )
        with Counter() as backward:
            loss.sum().backward()
    return forward.names, backward.names


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("options", "chunks"), [({"reduction": "mean"}, 5), ({"reduction": "none"}, 1), ({"grad_mode": "recompute"}, 1)]
)
def test_two_all_reduces_a_chunk_and_one_for_hidden(ranks, options, chunks, smoothing):
    for forward, backward in ranks.run(count, label_smoothing=smoothing, **options):
        assert forward == ["allgather_"] + ["allreduce_"] * (2 * chunks)
        assert backward == ["allreduce_"]


def backward_twice(rank):
    hidden, weight, _, labels = draw(30)
    mine = weight[rank * 15 :][:15].clone().requires_grad_()
    loss = linear_cross_entropy(hidden.requires_grad_(), mine, labels, vocab_parallel_group=dist.group.WORLD)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone(), mine.grad.clone()
    loss.backward()
    return torch.equal(hidden.grad, 2 * once[0]) and torch.equal(mine.grad, 2 * once[1])


def test_backward_twice(ranks):
    assert ranks.run(backward_twice) == [True, True]


def keep_main_grad(rank, grad_mode):
    hidden, weight, _, labels = draw(30)
    mine = weight[rank * 15 :][:15].clone().requires_grad_()
    mine.main_grad = torch.ones_like(mine)
    shared = {"vocab_parallel_group": dist.group.WORLD, "grad_mode": grad_mode}
    linear_cross_entropy(hidden, mine, labels, **shared).backward()
    right = mine.grad.clone()
    linear_cross_entropy(hidden, mine, labels, accum="main_grad", **shared).backward()
    return torch.equal(mine.grad, right), distance(mine.main_grad, right + 1)


@pytest.mark.parametrize("grad_mode", ["forward", "recompute"])
def test_main_grad_of_this_rank_s_rows(ranks, grad_mode):
    for untouched, wrong in ranks.run(keep_main_grad, grad_mode=grad_mode):
        assert untouched
        assert wrong < 1e-12


def half_frozen(rank):
    """Losses in bf16 of tokens that one rank alone would take in one chunk, with a frozen weight on rank 0."""
    hidden, weight, _, labels = draw(30, torch.bfloat16, ignored=0.0)
    mine = weight[rank * 15 :][:15].clone().requires_grad_(rank == 1)
    with mock.patch.multiple(chunking, **SMALL, ROWS_ALONE=30):
        alone = linear_cross_entropy(hidden, mine, labels % 15)
        loss = linear_cross_entropy(hidden.requires_grad_(), mine, labels, vocab_parallel_group=dist.group.WORLD)
        loss.backward()
    right = spec(hidden.detach().double(), weight.double(), labels)
    return alone.isfinite().item(), distance(loss.detach(), right), mine.grad is not None


def test_a_weight_that_is_frozen_on_one_rank_changes_no_chunk(ranks):
    for rank, (finite, wrong, trained) in enumerate(ranks.run(half_frozen)):
        assert finite
        assert wrong < 1e-2
        assert trained == (rank == 1)


# What may not be ------------------------------------------------------------------------------------------------------


def message(rank, what):
    hidden, weight, _, labels = draw(31)
    mine = weight[:16] if rank == 0 else weight[16:]
    if what == "other labels":
        labels[2, 9] = 3 + rank
    elif what == "more labels":
        hidden, labels = hidden[: 2 + rank], labels[: 2 + rank]
    elif what == "no rows":
        tensor = torch.distributed.tensor
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine, labels = tensor.distribute_tensor(weight[:1], mesh, [tensor.Shard(0)]), labels.clamp(max=0)
    elif what == "half wanted":
        hidden.requires_grad_(rank == 0)
    else:
        labels[0, 0] = 31
    try:
        linear_cross_entropy(hidden, mine, labels, vocab_parallel_group=dist.group.WORLD)
    except (ValueError, IndexError) as refused:
        return str(refused)


@pytest.mark.parametrize(
    ("what", "start"),
    [
        ("other labels", "labels: rank 1 has other labels than rank 0 (30 and 30 of them), and both are in the vocab"),
        ("more labels", "labels: rank 1 has other labels than rank 0 (30 and 20 of them), and both are in the vocab"),
        ("half wanted", "hidden: its gradient is wanted on rank 0 and not on rank 1, and it is summed over the ranks"),
        ("no rows", "weight: rank 1 of the vocabulary-parallel group has no row of the vocabulary; use fewer"),
        ("out of range", "labels: 31 at flat position 0 is not in [0, 31) and is not ignore_index (-100)"),
    ],
)
def test_every_rank_stops(ranks, what, start):
    for refused in ranks.run(message, what=what):
        assert refused.startswith(start)
