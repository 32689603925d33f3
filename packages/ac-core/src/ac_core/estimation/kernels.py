"""Fused kernels, as far as memory goes: norms and gated activations that keep their inputs and nothing in between.

They are found by what a module does and not by its class: it is run once on a tensor without values, and the operations
that it makes are looked at.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_NORM = {"pow", "mean", "add", "rsqrt", "mul", "_to_copy", "alias", "_fused_rms_norm", "unsqueeze", "view"}
_ACTIVATIONS = {"silu", "gelu", "sigmoid", "relu", "tanh", "leaky_relu", "hardtanh"}
_VIEWS = {"t", "view", "_unsafe_view", "split", "alias", "slice", "detach", "chunk", "transpose", "expand"}
_PRODUCTS = {"mm", "addmm", "linear", "matmul", "bmm"}


@dataclass(frozen=True)
class Fused:
    """How many modules were taken for fused kernels."""

    norms: int
    gates: int


def fuse(model: nn.Module) -> Fused:
    """Have the norms and the gated activations of a model of fake tensors keep what fused kernels keep.

    Norms: modules without children and with one weight vector, that multiply by the inverse root of a mean. The kernel
    keeps input, weight and one fp32 number a row. (`torch.nn.LayerNorm` is such a kernel already.)

    Gated activations: feed-forwards that are `down(act(gate(x)) * up(x))`, with two projections or with one that makes
    both, and experts with a method `_apply_gate`, as in transformers. The kernel keeps the outputs of the projections.
    """
    norms = gates = 0
    for module in model.modules():
        if _is_norm(module):
            module.forward = partial(_norm, module)  # type: ignore[assignment]
            norms += 1
        elif (forward := _gated(module)) is not None:
            module.forward = forward  # type: ignore[assignment]
            gates += 1
        elif callable(getattr(module, "_apply_gate", None)) and getattr(module, "has_gate", True):
            module._apply_gate = _GateOfOne.apply  # type: ignore[assignment]
            gates += 1
    return Fused(norms, gates)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, _rows = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return torch.empty_like(x) if of_x else None, torch.empty_like(weight) if of_weight else None


class _Gate(torch.autograd.Function):
    """`[..., f]` gate and up -> `[..., f]`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


class _GateOfOne(torch.autograd.Function):
    """`[..., 2 f]` gate and up in one -> `[..., f]`."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        return torch.empty_like(both)


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    return _Norm.apply(x, module.weight)


def _is_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    if list(module.children()) or list(own) != ["weight"] or own["weight"].dim() != 1:
        return False
    ops = _trial(module, own["weight"].new_empty(2, own["weight"].numel()))
    return ops is not None and bool({"rsqrt", "_fused_rms_norm"} & set(ops.names)) and set(ops.names) <= _NORM


def _gated(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The forward of a feed-forward with a fused gate; None for any other module."""
    leaves = [child for child in module.children() if any(True for _ in child.parameters())]
    if len(leaves) not in (2, 3) or not all(type(leaf) is nn.Linear for leaf in leaves):
        return None
    trial = _trial(module, leaves[0].weight.new_empty(2, leaves[0].in_features))
    if trial is None:
        return None
    heavy = trial.heavy
    activation = [name for name in heavy if name in _ACTIVATIONS]
    expected = sorted([*["product"] * len(leaves), "mul", *activation[:1]])
    if not activation or sorted(heavy) != expected or heavy[-2:] != ["mul", "product"]:
        return None
    order = [child for child in trial.called if child in leaves]
    return partial(_two if len(order) == 3 else _one, *order)


def _two(gate: nn.Module, up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
    return down(_Gate.apply(gate(x), up(x)))


def _one(both: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
    return down(_GateOfOne.apply(both(x)))


class _Trial(TorchDispatchMode):
    """What a module did. names: of its operations. called: its children, in the order in which they ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.called: list[nn.Module] = []

    @property
    def heavy(self) -> list[str]:
        """The operations without views, and with one name for every product."""
        return ["product" if name in _PRODUCTS else name for name in self.names if name not in _VIEWS]

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.names.append(func.overloadpacket.__name__)
        return result


def _trial(module: nn.Module, x: Tensor) -> _Trial | None:
    """What `module` does with `x`; None if it does not take it."""
    trial = _Trial()
    hooks = [child.register_forward_hook(lambda child, *_: trial.called.append(child)) for child in module.children()]
    level = _FAKE_LOG.level
    _FAKE_LOG.setLevel(logging.CRITICAL)  # which shapes a module does not take is no news
    try:
        with torch.no_grad(), trial:
            result = module(x)
    except Exception:  # noqa: BLE001 - it wants other arguments: it is no such module
        return None
    finally:
        _FAKE_LOG.setLevel(level)
        for hook in hooks:
            hook.remove()
    return trial if isinstance(result, Tensor) and result.shape == x.shape else None
