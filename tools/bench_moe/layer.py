"""The model: MoE layers without attention, so that a step is the experts, their dispatch and their combine."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu

import ac_moe
from tools.bench_moe.settings import Settings, Shape


class MoELayer(nn.Module):
    """A pre-norm residual layer, `[tokens, hidden]` to the same: `x + gate * moe(norm(x))`, or without `gate`.

    Router with softmax and normalised top-k, whose choice is pinned; SwiGLU experts on a grouped GEMM, the router's
    weight inside the activation. `gate [hidden]` stands for what DeepSeek's hyper-connections (mHC) and shared experts
    do: its gradient needs the output of the combine.
    """

    def __init__(self, shape: Shape, dispatcher: ac_moe.AllToAllDispatcher | ac_moe.HybridEPDispatcher, gated: bool):
        super().__init__()
        self.dispatcher, self.top_k = dispatcher, shape.top_k
        self.norm = nn.RMSNorm(shape.hidden)
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.gate = nn.Parameter(torch.full((shape.hidden,), 0.5)) if gated else None
        local = len(dispatcher.local_experts)
        self.gate_up = nn.Parameter(torch.randn(local, shape.hidden, 2 * shape.intermediate) * shape.hidden**-0.5)
        self.down = nn.Parameter(torch.randn(local, shape.intermediate, shape.hidden) * shape.intermediate**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        sent = self.dispatch(x)
        output = self.dispatcher.combine(self.project(self.activate(sent), sent), sent)
        return x + output if self.gate is None else x + self.gate * output

    def dispatch(self, x: Tensor) -> ac_moe.Dispatched:
        """The rows of this rank's experts."""
        x = self.norm(x)
        scores = self.router(x).float().softmax(-1)
        ids = ac_moe.routing.pin(ac_moe.routing.site_of(self), scores.topk(self.top_k).indices)
        weights = scores.gather(-1, ids)
        return self.dispatcher.dispatch(x, ids, weights / weights.sum(-1, keepdim=True))

    def activate(self, sent: ac_moe.Dispatched) -> Tensor:
        """`[rows, intermediate]`: what the down projection is given."""
        # No row is left over: neither dispatcher is asked to pad.
        gate, up = ac_moe.experts.grouped_mm(sent.rows, self.gate_up, _offsets(sent), padded=False).chunk(2, -1)
        return (silu(gate) * up * sent.weights[:, None]).to(sent.rows.dtype)

    def project(self, inner: Tensor, sent: ac_moe.Dispatched) -> Tensor:
        """`[rows, hidden]`: the down projection."""
        return ac_moe.experts.down_projection(inner, self.down, _offsets(sent), padded=False)


def build(settings: Settings, dispatcher: str, gated: bool, device: torch.device) -> nn.ModuleList:
    """The layers, the same on every call; experts of each rank are its own."""
    make = _dispatcher(dispatcher, settings.buffer)
    torch.manual_seed(dist.get_rank())
    with device:
        layers = nn.ModuleList(
            MoELayer(settings.shape, make(settings.shape.experts, name=f"layers.{number}"), gated)
            for number in range(settings.shape.layers)
        )
    return layers.to(getattr(torch, settings.dtype))


def _dispatcher(name: str, buffer: str) -> Callable[..., ac_moe.AllToAllDispatcher | ac_moe.HybridEPDispatcher]:
    if name == "alltoall":
        return ac_moe.AllToAllDispatcher
    made = ac_moe.reference.HybridEPBuffer if buffer == "reference" else None  # None: DeepEP's
    return functools.partial(ac_moe.HybridEPDispatcher, buffer=made)


def _offsets(sent: ac_moe.Dispatched) -> Tensor:
    return sent.tokens_per_expert.cumsum(0).int()
