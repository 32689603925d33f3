"""Models that the tests share, in plain torch: ac-core's tests run where nothing but torch and pytest is installed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


class MLPBlock(nn.Module):
    """A pre-norm residual block with a dropout."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + self.dropout(y if scale is None else y * scale)


class Stack(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(MLPBlock(dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale=torch.ones((), dtype=x.dtype))
        return self.head(x)


@pytest.fixture
def stack() -> Callable[..., Stack]:
    """Builds a `Stack` with the same weights every time."""

    def build(**options: object) -> Stack:
        torch.manual_seed(0)
        return Stack(**options)

    return build


@pytest.fixture
def train_step() -> Callable[[nn.Module], tuple[Tensor, dict[str, Tensor]]]:
    """One forward and backward: the loss and every gradient by name."""
    ids = torch.arange(24).reshape(2, 12) % 32

    def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(7)
        model.zero_grad(set_to_none=True)
        loss = model(ids).square().mean()
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    return step


@pytest.fixture
def assert_same_step(train_step: Callable) -> Callable[[nn.Module, nn.Module], None]:
    """Two models give the same loss and the same gradients, bit for bit."""

    def check(left: nn.Module, right: nn.Module) -> None:
        (loss_l, grads_l), (loss_r, grads_r) = train_step(left), train_step(right)
        assert torch.equal(loss_l, loss_r)
        assert grads_l.keys() == grads_r.keys()
        assert [n for n in grads_l if not torch.equal(grads_l[n], grads_r[n])] == []

    return check


@pytest.fixture
def count_forwards() -> Callable[[nn.Module], Callable[[], int]]:
    """Counts how often the block's own `up` projection runs: 1 a step without checkpointing, 2 with."""

    def attach(module: nn.Module) -> Callable[[], int]:
        calls = [0]

        def hook(*_: object) -> None:
            calls[0] += 1

        module.register_forward_hook(hook)
        return lambda: calls[0]

    return attach


@pytest.fixture
def saved_bytes() -> Callable[[nn.Module], int]:
    """Bytes that the forward keeps for the backward besides parameters, each storage once.

    Counted where autograd itself looks: by the storages alive after the forward that were not alive before.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.weak import WeakIdKeyDictionary

    class Storages(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live = WeakIdKeyDictionary()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.live[leaf.untyped_storage()] = True
            return out

    def measure(model: nn.Module) -> int:
        import gc

        ids = torch.arange(24).reshape(2, 12) % 32
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        with Storages() as storages:
            loss = model(ids).square().mean()
        gc.collect()
        total = sum(storage.nbytes() for storage in storages.live if storage.data_ptr() not in weights)
        loss.backward()
        return total

    return measure
