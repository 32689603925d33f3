"""A mixture layer on one process, without a group: its exchange only permutes. For what does not need ranks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import ac_moe
from ac_moe.cache.combine import combine
from ac_moe.cache.region import Site

ROWS, HIDDEN, WIDE = 7, 16, 8
ENDS = (3, 3, 7)  # one expert without rows


class Reversal:
    """An exchange that reverses the rows: its own adjoint."""

    collectives = 1
    fingerprint = "reversed"

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.flip(0)

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.flip(0)


class LocalLayer(nn.Module):
    """`x + scale * combine(experts(x))`; `between` and `after` see the output of the down projection."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, wide: int = WIDE, name: str | None = None) -> None:
        super().__init__()
        self.site = Site("Layer", name)
        self.up = nn.Parameter(torch.randn(len(ENDS), HIDDEN, 2 * wide, dtype=dtype) * 0.3)
        self.down = nn.Parameter(torch.randn(len(ENDS), wide, HIDDEN, dtype=dtype) * 0.3)
        self.scale = nn.Parameter(torch.randn(HIDDEN, dtype=dtype))
        self.between = self.after = nothing

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor(ENDS, dtype=torch.int32)
        gate, up = ac_moe.experts.grouped_mm(x, self.up, offsets).chunk(2, -1)
        return ac_moe.experts.down_projection(F.silu(gate) * up, self.down, offsets)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.experts(x)
        y = combine(self.between(rows), Reversal(), self.site)
        self.after(rows)
        return x + y * self.scale


def nothing(rows: torch.Tensor) -> torch.Tensor:
    return rows


def layers(count: int = 2, dtype: torch.dtype = torch.float32, **options: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(LocalLayer(dtype, **options) for _ in range(count)))


def inputs(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(ROWS, HIDDEN, generator=generator).to(dtype) for _ in range(count)]


Run = Callable[[Callable, torch.Tensor], torch.Tensor]


def direct(block: Callable, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def non_reentrant(mode: str, *, inner: Callable | None = None, **options: object) -> Run:
    context_fn = ac_moe.context_fn(mode, inner=inner)
    return lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=context_fn, **options)


def reentrant(mode: str) -> Run:
    return lambda block, x: checkpoint(ac_moe.wrap_reentrant(block, mode), x, use_reentrant=True)


def each(run: Run, model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """`model` with each of its layers run by `run`."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = run(layer, x)
        return x

    return forward


def gradients(
    model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], xs: list[torch.Tensor], order: str | None = None
) -> list[torch.Tensor]:
    """Of inputs and parameters, after forwards of all and backwards in `order` (`"102"`)."""
    model.zero_grad()
    leaves = [x.clone().requires_grad_() for x in xs]
    losses = [forward(x).float().square().sum() for x in leaves]
    for number in order or range(len(xs)):
        losses[int(number)].backward()
    return [tensor.grad.clone() for tensor in (*leaves, *model.parameters())]


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    assert len(ones) == len(others) > 0
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@dataclasses.dataclass
class Products:
    count: int = 0


@contextlib.contextmanager
def matrix_products() -> Iterator[Products]:
    """Counts the kernels `aten::mm`: a grouped GEMM on a CPU is one for each expert."""
    products = Products()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield products
    products.count = sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")
