"""The forwards that take the place of those of experts and router, on the instances of one model."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ac_moe.cache.engine import running_node
from ac_moe.cache.region import Site, in_region
from ac_moe.dispatch.base import Dispatched, Dispatcher
from ac_moe.experts import down_projection, grouped_mm
from ac_moe.parallel.discovery import Experts
from ac_moe.parallel.parameters import local_tensor
from ac_moe.routing import counted_once, pin

# NOTE [ A forward on the instance ]
#
# 1. Only `module.forward` is set: class, name, parameters and hooks of the module stay, so state_dict, isinstance,
#    fully_shard and transformers' own recording of router logits see the model that they know.
# 2. It is an object that holds the module, not a closure: a deep copy of the model computes with the copy's weights.
# 3. The original is looked up on the class at each call, because `fully_shard` gives the module another class.

# NOTE [ Where the router's weight goes ]
#
# down(act) * w = down(act * w), for a down projection without bias and with nothing between it and the sum. With the
# weight inside, combine is a plain sum, whose backward saves nothing, and the output of the down projection has no
# other reader: that is what lets `moe_tail` leave its product out. With a bias or a norm after it the weight multiplies
# the rows, autograd keeps them for the weight's gradient, and `moe_tail` is refused.


_FORGOTTEN = (
    "experts shared out by ac_moe.parallelize are recomputed by a checkpoint without an ac-moe context: "
    "dispatcher_recompute_cache is not applied, and routing is neither kept nor compared. Give the checkpoint the "
    'context of what parallelize returned: model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": '
    "sharded.context_fn})"
)


class ExpertsForward:
    """`forward(hidden_states, top_k_index, top_k_weights)` of experts whose parameters are sharded.

    Args:
        experts: the module, sharded.
        dispatcher: over the ranks of the mesh.
        gradient_divisor: see NOTE [ Gradients of experts ].
    """

    def __init__(self, experts: Experts, dispatcher: Dispatcher, gradient_divisor: int) -> None:
        self.experts = experts
        self.dispatcher = dispatcher
        self.gradient_divisor = gradient_divisor
        self._routing = Site("experts", f"{experts.name} (routing)")

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        """`[tokens, hidden]`, `[tokens, top_k]` twice, to `[tokens, hidden]` in the dtype of `hidden_states`."""
        _warn_without_context()
        ids, weights = pin(self._routing, top_k_index), pin(self._routing, top_k_weights)
        sent = self.dispatcher.dispatch(hidden_states, ids, weights)
        return self._compute_and_combine(sent).to(hidden_states.dtype)

    def _compute_and_combine(self, sent: Dispatched) -> torch.Tensor:
        """Rows for this rank's experts, `[rows, hidden]`, to the sums for its tokens, `[tokens, hidden]`."""
        experts, module = self.experts, self.experts.module
        up, down, *biases = (
            local_tensor(getattr(module, name), self.gradient_divisor) for name in experts.parameter_names
        )
        if not experts.is_transposed:
            up, down = up.transpose(-2, -1), down.transpose(-2, -1)
        offsets = sent.tokens_per_expert.cumsum(0).int()
        weights = sent.weights[:, None]

        inner = grouped_mm(sent.rows.to(up.dtype), up, offsets, padded=False)
        if biases:
            expert_of_row = torch.repeat_interleave(sent.tokens_per_expert, output_size=inner.shape[0])
            inner = inner + biases[0][expert_of_row]
        inner = module._apply_gate(inner) if experts.has_gate else module.act_fn(inner)
        if not experts.weighted_after:  # see NOTE [ Where the router's weight goes ]
            return self._project_and_combine((inner * weights).to(down.dtype), down, offsets, sent)
        rows = grouped_mm(inner.to(down.dtype), down, offsets, padded=False)
        if biases:
            rows = rows + biases[1][expert_of_row]
        if experts.has_norm:
            rows = module.post_expert_norm(rows)
        return self.dispatcher.combine((rows * weights).to(rows.dtype), sent)

    @torch.compiler.disable(reason="between its functions dynamo looks at tensors, and combine must be the only reader")
    def _project_and_combine(
        self, inner: torch.Tensor, down: torch.Tensor, offsets: torch.Tensor, sent: Dispatched
    ) -> torch.Tensor:
        return self.dispatcher.combine(down_projection(inner, down, offsets, padded=False), sent)


@torch.compiler.disable(reason="autograd's engine is asked")
def _warn_without_context() -> None:
    if running_node() is not None and torch.is_grad_enabled() and not in_region():
        warnings.warn(_FORGOTTEN, stacklevel=3)


class RouterForward:
    """The router's own forward, whose logits are those of the block's forward when the block is recomputed."""

    def __init__(self, experts: Experts) -> None:
        self.module: nn.Module = experts.router
        self._num_experts = experts.num_experts
        self._site = Site("router", experts.router_name)

    @torch.compiler.disable(reason="ac-moe pins routing by layer and call, which a graph cannot")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with counted_once(self.module), _PinLogits(self._site, self._num_experts):
            return type(self.module).forward(self.module, *args, **kwargs)


class _PinLogits(TorchFunctionMode):
    """Pins what a matrix product gives for each expert.

    At the root of all that follows: softmax, bias, groups and top-k are then computed from the same bits, and what they
    save for the backward agrees with the routing that the forward used.
    """

    PRODUCTS = frozenset(
        {
            nn.functional.linear,
            torch.addmm,
            torch.einsum,
            torch.matmul,
            torch.mm,
            torch.Tensor.__matmul__,
            torch.Tensor.matmul,
            torch.Tensor.mm,
        }
    )

    def __init__(self, site: Site, num_experts: int) -> None:
        super().__init__()
        self._site = site
        self._num_experts = num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.PRODUCTS and result.shape[-1] == self._num_experts:
            return pin(self._site, result)
        return result
