"""What the dispatchers have in common: the interface, the checks of inputs, and the autograd node of dispatch."""

import abc
import copy
import dataclasses
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ac_moe.cache.combine import Exchange as CombineExchange
from ac_moe.cache.combine import combine, exchange_of
from ac_moe.cache.modes import without_dispatch_modes
from ac_moe.cache.region import Site

_NOT_TRACED = "routing gives each rank another number of rows, which only the running program knows"

# NOTE [ Dispatch in a recompute ]
#
# 1. Whether the recompute routes as the forward did is checked in `dispatch` and not in `combine`: early stop ends the
#    recompute of `x + moe(x)` before its combine, and the experts' saved rows would be wrong all the same.
# 2. It is checked before rows are sent, and by something that every rank of the group learns alike, so that all raise
#    and none waits for another.
# 3. As with combine, the forward and the recompute build the same node, `_Dispatch`, which saves no tensor: see
#    NOTE [ One node in both phases ] in `ac_moe.cache.combine`. Its dtypes are those of the inputs also where no row
#    comes or goes, so that the experts save the same in both phases.


class Exchange(CombineExchange, Protocol):
    """The routing of one dispatch, which also carries router weights: what a dispatcher plans."""

    tokens_per_expert: torch.Tensor
    """int64 `[local experts]`, on the device. Known once rows were sent."""
    splits: tuple[int, ...]
    """The same on the host."""

    def send(self, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[tokens, hidden]` and `[tokens, top_k]` to `[rows, hidden]` and `[rows]`."""

    def send_back(
        self, rows: torch.Tensor, weights: torch.Tensor, needed: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The adjoint of `send`. What is not needed is None."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dispatched:
    """What this rank's experts work on."""

    rows: torch.Tensor
    """`[rows, hidden]`, dtype of the tokens, ordered by local expert. May have no row."""
    weights: torch.Tensor
    """`[rows]`, the router weight of each row, for the experts to apply."""
    tokens_per_expert: torch.Tensor
    """int64 `[local experts]`, on the device. `tokens_per_expert.cumsum(0).int()` are a grouped GEMM's offsets."""
    splits: list[int]
    """The same numbers on the host: `rows.split(splits)` are the experts' blocks."""
    _exchange: Exchange = dataclasses.field(repr=False)


class Dispatcher(abc.ABC):
    """Sends each token to the ranks of its experts and sums what they return. One per MoE layer.

    All ranks of the group must call `dispatch` and `combine` alike, with as many tokens as each has, also none; and the
    result of `combine` must depend on `rows` on every rank, also on one that received no row, because the backward
    communicates too.

    It holds no tensor and no state of a call. With the default group it can be pickled; it can always be deep-copied,
    and the copy uses the same group.

    Args:
        num_experts: of the whole group, a multiple of its size. Expert `e` lives on rank `e // (num_experts / size)`.
        group: the expert-parallel process group; None takes the default group of the moment of each call.
        name: how errors call this layer, such as its module path; a number if it has none.

    Raises:
        ValueError: `num_experts` is not a positive integer.
        TypeError: `group` is no process group.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None = None, *, name: str | None = None) -> None:
        if not isinstance(num_experts, int) or num_experts < 1:
            raise ValueError(f"num_experts: {num_experts!r} is not a positive integer")
        # What new_group returns to ranks outside of the group is no process group either; local_experts refuses it.
        outside = group is dist.GroupMember.NON_GROUP_MEMBER
        if not (group is None or outside or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"group: {type(group).__name__} is not a ProcessGroup; of a mesh, give mesh.get_group()")
        self.num_experts = num_experts
        self.group = group
        self._site = Site(type(self).__name__, name)

    @property
    def local_experts(self) -> range:
        """The experts of this rank.

        Raises:
            ValueError: the group's size does not divide `num_experts`, this rank is not in the group, or
                `torch.distributed` is not initialised.
        """
        size = dist.get_world_size(self.group)
        if size < 1:
            raise ValueError(f"group: rank {dist.get_rank()} is not in the expert-parallel group of {self._site}")
        if self.num_experts % size:
            raise ValueError(
                f"num_experts: {self.num_experts} experts cannot be shared equally by the {size} ranks of the group; "
                f"it must be a multiple of {size}"
            )
        count = self.num_experts // size
        first = dist.get_rank(self.group) * count
        return range(first, first + count)

    @torch.compiler.disable(reason=_NOT_TRACED)
    def dispatch(self, tokens: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Sends each token to its experts. Gradients flow to `tokens` and `weights`.

        Args:
            tokens: `[tokens, hidden]`, floating. Ranks may have different numbers of tokens, also none.
            expert_ids: integer `[tokens, top_k]`, in `[0, num_experts)`.
            weights: `[tokens, top_k]`, floating, of a dtype of its own.

        Returns:
            The rows for the experts of this rank, ordered by expert.

        Raises:
            ValueError: a shape, dtype or device does not fit, `num_experts` does not fit the group, or an expert id is
                out of range.
            TypeError: an argument is no tensor.
            RecomputeRoutingMismatchError: on every rank of the group, if in the recompute of a checkpointed block with
                an ac-moe context any rank routes otherwise than in the forward.
            RecomputeCacheError: the recompute calls `dispatch` more often than the forward did.
        """
        _check_inputs(tokens, expert_ids, weights)
        _ = self.local_experts  # raises if the group does not fit
        exchange = self._plan(tokens, expert_ids, weights)
        rows, row_weights = _Dispatch.apply(tokens, weights, exchange)
        return Dispatched(
            rows=rows,
            weights=row_weights,
            tokens_per_expert=exchange.tokens_per_expert,
            splits=list(exchange.splits),
            _exchange=exchange,
        )

    @torch.compiler.disable(reason=_NOT_TRACED)
    def combine(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Returns the experts' rows to their tokens and sums them, unweighted, in at least float32.

        Its backward is the dispatch of the gradient. The output must not be edited in place inside a checkpointed
        block that keeps it.

        Args:
            rows: `[rows, hidden]`, floating, the experts' output in the order of `dispatched.rows`. `hidden` and dtype
                may be others than those of the tokens, but must be the same on all ranks.
            dispatched: what `dispatch` returned.

        Returns:
            `[tokens, hidden]`, dtype of `rows`.

        Raises:
            ValueError: `rows` has another number of rows than `dispatched.rows`.
            TypeError: `dispatched` is not what `dispatch` returns, or `rows` no tensor.
            RecomputeCacheError, RecomputeRoutingMismatchError: in a recompute; see `ac_moe.errors`.
        """
        if not isinstance(dispatched, Dispatched):
            raise TypeError(
                f"dispatched: {type(dispatched).__name__} is not what dispatch returned; call combine(rows, dispatched)"
            )
        _check_is_tensor("rows", rows)
        expected = dispatched.rows.shape[0]
        if rows.ndim != 2 or rows.shape[0] != expected:
            raise ValueError(f"rows: shape {list(rows.shape)} does not fit; expected [{expected}, hidden]")
        return combine(rows, dispatched._exchange, self._site)

    @abc.abstractmethod
    def _plan(self, tokens: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Exchange:
        """Decides who sends what to whom, and in a recompute that it is what the forward decided."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_experts={self.num_experts}, name={str(self._site)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Dispatcher":
        # A process group is a connection of this process: a copy shares it.
        new = copy.copy(self)
        new._site = copy.deepcopy(self._site, memo)
        memo[id(self)] = new
        return new

    def __copy__(self) -> "Dispatcher":
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(
                f"{self._site} cannot be pickled: its process group is a connection of this process. Save the model's "
                "state_dict, or set `dispatcher.group = None` first, which takes the default group."
            )
        return self.__dict__


class _Dispatch(torch.autograd.Function):
    """Tokens and router weights to rows. Saves no tensor: its backward needs the routing alone."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, exchange: Exchange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        with without_dispatch_modes():
            rows, row_weights = exchange.send(tokens, weights)
        # What came from a frozen input is frozen too: the experts need not compute its gradient.
        frozen = [
            output for output, needed in zip((rows, row_weights), ctx.needs_input_grad[:2], strict=True) if not needed
        ]
        ctx.mark_non_differentiable(*frozen)
        return rows, row_weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        for_tokens, for_weights, _ = ctx.needs_input_grad
        return *exchange_of(ctx).send_back(rows, weights, (for_tokens, for_weights)), None


def _check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__} is not a tensor")


def _check_inputs(tokens: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
    for name, value in (("tokens", tokens), ("expert_ids", expert_ids), ("weights", weights)):
        _check_is_tensor(name, value)
    if tokens.ndim != 2 or not tokens.is_floating_point():
        raise ValueError(f"tokens: {_told(tokens)} does not fit; expected floating [tokens, hidden]")
    integral = not (expert_ids.is_floating_point() or expert_ids.is_complex() or expert_ids.dtype == torch.bool)
    if expert_ids.ndim != 2 or expert_ids.shape[0] != tokens.shape[0] or not expert_ids.shape[1] or not integral:
        raise ValueError(
            f"expert_ids: {_told(expert_ids)} does not fit; expected integer [{tokens.shape[0]}, top_k] with top_k >= 1"
        )
    if weights.shape != expert_ids.shape or not weights.is_floating_point():
        raise ValueError(f"weights: {_told(weights)} does not fit; expected floating {list(expert_ids.shape)}")
    if not tokens.device == expert_ids.device == weights.device:
        raise ValueError(
            f"tokens, expert_ids, weights: on {tokens.device}, {expert_ids.device}, {weights.device}; "
            "they must be on one device"
        )


def _told(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
