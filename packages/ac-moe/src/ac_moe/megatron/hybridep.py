"""Megatron's flex dispatcher with HybridEP: the forward's layout in each recompute, and its combine, kept."""

import dataclasses
import inspect
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ac_moe.cache.combine import combine, exchange_of
from ac_moe.cache.modes import without_dispatch_modes
from ac_moe.cache.region import Site, claim
from ac_moe.megatron.replacement import Replacement

# NOTE [ HybridEP in a recompute ]
#
# 1. HybridEP decides anew in each dispatch without a handle where in an expert's block a row goes, and may decide
#    otherwise. A non-reentrant checkpoint runs the forward's graph on the recompute's tensors, so rows would meet
#    gradients of other rows (NVIDIA-NeMo/Automodel#3743). A recompute therefore dispatches with the forward's handle.
# 2. Megatron's own dispatch cannot be given a handle, so in a recompute `_Redispatch` does what it does. Both save no
#    tensor, and so are one to the checkpoint.
# 3. Both run out of sight of dispatch modes, as do all dispatchers of ac-moe: with a handle fewer operators run.

LAYOUT = "layout"


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Implements `ac_moe.cache.combine.Exchange`: what HybridEP decided in one dispatch."""

    handle: tuple[Any, ...]
    tokens_per_expert: torch.Tensor
    """int `[local experts]`, with padding."""
    rows: int | torch.Tensor
    """How many there are for this rank's experts, padding included."""
    pad_multiple: int | None
    tokens: int
    """That this rank has."""
    sent: int
    """The same, with what Megatron adds so that all ranks have as many."""
    fused: bool
    """Whether HybridEP permutes in the same kernel."""
    collectives: int = 2
    """The barrier and the all-to-all."""
    fingerprint: object = None

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return self.send_back(rows, None)[0]

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.send(tokens, None)[0]

    def send(self, tokens: torch.Tensor, probs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[tokens, hidden]` and `[sent, experts]` float32 to `[rows, hidden]` and `[rows]`."""
        if tokens.shape[0] < self.sent:
            tokens = torch.cat([tokens, tokens.new_zeros(self.sent - tokens.shape[0], tokens.shape[1])])
        rows, row_probs, *_ = _buffer().dispatch_with_permute(
            hidden=tokens.contiguous(),
            probs=probs,
            scaling_factor=None,
            handle=self.handle,
            pad_multiple=self.pad_multiple,
            num_permuted_tokens=self.rows,
            **({"fuse_permute_dispatch": True} if self.fused else {}),
        )
        return rows, row_probs

    def send_back(self, rows: torch.Tensor, probs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The adjoint of `send`."""
        tokens, token_probs = _buffer().combine_with_unpermute(
            hidden=rows.contiguous(),
            probs=probs,
            handle=self.handle,
            pad_multiple=self.pad_multiple,
            **({"fuse_unpermute_combine": True} if self.fused else {}),
        )
        return tokens[: self.tokens], token_probs


class SetupMetadata(Replacement):
    """`setup_metadata`: nothing is left of a call that ended early; see NOTE [ A dispatcher forgets ]."""

    def __init__(self, manager: Any) -> None:
        super().__init__(manager, "setup_metadata")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.owner.num_permuted_tokens = None  # sizes that do not depend on the routing are set in the original
        self.original(*args, **kwargs)


class Dispatch(Replacement):
    """`dispatch` of the HybridEP manager; see NOTE [ HybridEP in a recompute ]."""

    def __init__(self, manager: Any, site: Site) -> None:
        super().__init__(manager, "dispatch")
        self.site = site

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        claimed = claim(self.site, LAYOUT)
        with without_dispatch_modes():
            if claimed.kept is None:
                rows = self.original(hidden_states, *args, **kwargs)
                claimed.keep(layout_of(self.owner))
                return rows
            claimed.pass_on()
            return self._again(hidden_states, claimed.kept.value)

    def _again(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        manager = self.owner
        manager.token_probs = manager.token_probs.float()
        manager.handle = layout.handle
        manager.tokens_per_expert = layout.tokens_per_expert
        manager.num_permuted_tokens = layout.rows
        manager.pad_multiple = layout.pad_multiple
        rows, manager.dispatched_probs = _Redispatch.apply(hidden_states, manager.token_probs, layout)
        return rows


class Combine(Replacement):
    """`combine` of the HybridEP manager."""

    def __init__(self, manager: Any, site: Site) -> None:
        super().__init__(manager, "combine")
        self.site = site

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return combine(hidden_states, layout_of(self.owner), self.site)


class _Redispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, probs: torch.Tensor, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = layout
        return layout.send(tokens, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *exchange_of(ctx).send_back(rows, probs), None


def layout_of(manager: Any) -> Layout:
    """What `manager` knows after its dispatch."""
    sent = manager.routing_map.shape[0]
    fused = getattr(manager.config, "moe_permute_fusion_into_hybridep", False)
    return Layout(
        handle=manager.handle,
        tokens_per_expert=manager.tokens_per_expert,
        rows=manager.num_permuted_tokens,
        pad_multiple=manager.pad_multiple,
        tokens=getattr(manager, "_original_num_tokens", None) or sent,
        sent=sent,
        fused=fused and "fuse_permute_dispatch" in inspect.signature(_buffer().dispatch_with_permute).parameters,
    )


def _buffer() -> Any:
    # Private: Megatron makes one buffer for the process, in its first dispatch, and gives no other access to it.
    from megatron.core.transformer.moe import fused_a2a

    return fused_a2a._hybrid_ep_buffer
