"""Inputs and instruments shared by the tests of ac-loss."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ac_loss.backends.torch_backend import chunking, products

# With --import-mode=importlib a test file cannot import its neighbours by name; the ranks' processes could not either.
sys.path.insert(0, str(Path(__file__).parent))

from ac_loss_ranks import Ranks


class Recorder(TorchDispatchMode):
    """Every ATen call of a region: matrix products by dtype, and the elements of the largest tensor allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[torch.dtype] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        fresh = [t.untyped_storage() for t in _tensors(out) if t.untyped_storage().data_ptr() not in given]
        if name in ("mm", "addmm", "addmm_", "bmm", "matmul"):
            self.products.append(args[-1].dtype)
        size = _tensors(out)[0].element_size() if fresh else 1
        self.largest = max([self.largest, *(storage.nbytes() // size for storage in fresh)])
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and tiles of a few rows, blocks of a few rows within them, slabs of a few rows of a product."""
    for name, value in {
        "ROWS_WIDE": 7,
        "ROWS_NARROW": 9,
        "ROWS_FLOOR": 3,
        "ROWS_ALONE": 12,
        "BLOCK_BYTES_CPU": 3 * 31 * 4,
        "SLAB_BYTES_CPU": 200,
        "TILE_ROWS": 11,
        "TILE_COLUMNS_FLOOR": 5,
        "TILE_COLUMNS_STEP": 1,
        "TILE_BYTES_CPU": 11 * 6 * 4,
    }.items():
        monkeypatch.setattr(chunking, name, value)
    monkeypatch.setattr(products, "WIDE_TOKENS", 0)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["narrow products", "wide products"])
def bf16_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """What bf16 operands are multiplied in, whatever this CPU would choose; both in turn, where a test does not say."""
    monkeypatch.setattr(products, "cpu_is_slow_in_bfloat16", lambda: request.param == torch.float32)
    monkeypatch.setattr(products, "WIDE_TOKENS", 0)
    return request.param


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes with an initialised gloo group, shared by the tests and replaced after a failure."""
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def draw() -> Callable[..., dict[str, torch.Tensor]]:
    return _draw


@pytest.fixture(scope="session")
def gradients() -> Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    return _gradients


@pytest.fixture(scope="session")
def assert_near() -> Callable[..., None]:
    return _assert_near


def _assert_near(got: torch.Tensor | None, right: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Within a few roundings of ``dtype``, relative to the largest entry."""
    if right is None or got is None:
        assert got is right
        return
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1.6e-2}[dtype]
    right = right.double()
    scale = right.abs().max().item() if right.numel() else 0.0
    torch.testing.assert_close(got.double(), right, rtol=0, atol=tolerance * max(scale, 1e-30))


def _draw(
    tokens: int | tuple[int, ...], vocab: int, width: int, dtype: torch.dtype = torch.float64, ignored: float = 0.3
) -> dict[str, torch.Tensor]:
    """Seeded inputs: about ``ignored`` of the labels are -100."""
    shape = (tokens,) if isinstance(tokens, int) else tokens
    generator = torch.Generator().manual_seed(17)
    labels = torch.randint(0, vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = -100
    return {
        "hidden": torch.randn(*shape, width, generator=generator, dtype=torch.float64).to(dtype),
        "weight": torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype),
        "bias": torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype),
        "labels": labels,
    }


def _gradients(
    function: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor], upstream: Any = 1.0, **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and the gradients of hidden, weight and bias (where given) under ``upstream``."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in inputs.items() if k != "labels"}
    loss = function(**leaves, labels=inputs["labels"], **options)
    (loss * upstream).sum().backward()
    return loss.detach(), {k: v.grad for k, v in leaves.items()}


@pytest.fixture(scope="session")
def peak_bytes() -> Callable[..., int]:
    return _peak_bytes


def _peak_bytes(function: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor], **options: Any) -> int:
    """Most bytes held at a time by forward and backward on the CPU, beyond inputs and gradients.

    Inputs that already require a gradient, or labels, are taken as they are; the others are made to.
    """
    leaves = {k: v if k == "labels" else v.requires_grad_() for k, v in inputs.items()}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function(**leaves, **options).sum().backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most - sum(t.grad.nbytes for t in leaves.values() if t.grad is not None)
