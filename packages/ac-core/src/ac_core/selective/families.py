"""Which calls are worth keeping, by what they are: families of calls, and the ops that a call amounts to."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import is_lazy

ATTENTION, MATMUL, COLLECTIVE, ROUTER = "attention", "matmul", "collective", "router"

_MATMULS = {
    "linear": ("linear", "mm", "addmm"),
    "matmul": ("matmul", "mm", "bmm"),
    "__matmul__": ("matmul", "mm", "bmm"),
    "__rmatmul__": ("matmul", "mm", "bmm"),
    "mm": ("mm",),
    "bmm": ("bmm",),
    "addmm": ("addmm",),
    "baddbmm": ("baddbmm",),
    "einsum": ("einsum", "bmm"),
    "grouped_mm": ("_grouped_mm",),
    "_grouped_mm": ("_grouped_mm",),
    "scaled_grouped_mm": ("_scaled_grouped_mm",),
    "_scaled_mm": ("_scaled_mm",),
}
_ATEN_MATMULS = frozenset(op for ops in _MATMULS.values() for op in ops)
_FUSED_ATTENTION = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_SYNONYMS = {
    "layer_norm": ("layer_norm", "native_layer_norm"),
    "group_norm": ("group_norm", "native_group_norm"),
    "batch_norm": ("batch_norm", "native_batch_norm"),
    "rms_norm": ("rms_norm", "_fused_rms_norm"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), ("convolution", "conv1d", "conv2d", "conv3d")),
    "to": ("to", "_to_copy"),
    "__add__": ("add",),
    "__mul__": ("mul",),
    "__rmul__": ("mul",),
    "__sub__": ("sub",),
    "__truediv__": ("div",),
    "__pow__": ("pow",),
}
"""Functions whose op has another name than they."""
_ATTENTION_OP = re.compile(r"attention|attn|fmha", re.IGNORECASE)
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_AFTER_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")  # hand on the output of one


@dataclass(frozen=True)
class CallKind:
    """What a Python-level call is.

    name: of the function. family: attention, matmul, collective, router, or empty. ops: names of the ops that it may
    run, such as `aten::mm`.
    """

    name: str
    family: str
    ops: frozenset[str]


@lru_cache(maxsize=4096)
def kind_of(function: Callable[..., Any]) -> CallKind:
    """The kind of a function that a `TorchFunctionMode` sees: one of torch's, a tensor method, a registered op."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _kind_of_op(function)
    name = getattr(function, "__name__", "")
    family, ops = "", _SYNONYMS.get(name, (name, f"_{name}") if name else ())
    if name in _MATMULS:
        family, ops = MATMUL, _MATMULS[name]
    elif function in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
        # The matmuls of the latter are inside of it: with the attention kept they are kept as well.
        family, ops = ATTENTION, _FUSED_ATTENTION
    elif name in ("flex_attention", "varlen_attn"):
        family, ops = ATTENTION, ()
    elif name == "topk":
        family = ROUTER
    return CallKind(name, family, frozenset(f"aten::{op}" for op in ops))


def _kind_of_op(op: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> CallKind:
    """The kind of a registered op, as Python calls it or as a dispatch mode sees it below autograd."""
    qualified = op._schema.name if isinstance(op, torch._ops.OpOverload) else op._qualified_op_name
    namespace, _, name = str(qualified).partition("::")
    if namespace in _COLLECTIVES:
        family = COLLECTIVE
    elif name in _FUSED_ATTENTION or (namespace != "aten" and _ATTENTION_OP.search(name) and "backward" not in name):
        family = ATTENTION
    elif name in _ATEN_MATMULS:
        family = MATMUL
    else:
        family = ROUTER if name == "topk" else ""
    return CallKind(name, family, frozenset((str(qualified),)))


def is_unsavable(kind: CallKind, kwargs: dict[str, Any]) -> bool:
    """Calls that look like one of a family but are not to be kept."""
    if "out" in kwargs or kind.name in _AFTER_COLLECTIVES:
        return True
    # With the weights asked for, attention runs as plain matmuls over the square of the sequence.
    return kind.name == "multi_head_attention_forward" and kwargs.get("need_weights", True)


@dataclass(frozen=True)
class MatmulLeaf:
    """A module whose whole forward is one product with its weight. features: of its output, or None if not known."""

    inner: int
    features: int | None


def matmul_leaf(module: nn.Module) -> MatmulLeaf | None:
    """The product that a module stands for: `nn.Linear` and what looks like it, such as Hugging Face's `Conv1D`."""
    # Not `module.weight`: a parametrized one is computed when it is read.
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight) or weight.dim() != 2 or any(True for _ in module.children()):
        return None
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.Bilinear) or not names <= {"weight", "bias"}:
        return None
    features: int | None = getattr(module, "nf", None)  # Hugging Face's Conv1D keeps its weight as [in, out]
    if isinstance(module, nn.Linear):
        features = module.out_features
    elif features not in weight.shape:
        features = None
        if "linear" not in type(module).__name__.lower():  # Megatron's, quantised ones: a run shows their output's size
            return None
    return MatmulLeaf(weight.numel() // features if features else weight.shape[1], features)
