"""The head of a model: where it is, and how its matrix product is left out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ac_loss.huggingface.errors import FusedLossError
from ac_loss.huggingface.expression import Expression
from ac_loss.huggingface.lazy import LazyLogits
from ac_loss.huggingface.origin import Origin, cost

# NOTE [ The head runs, its product does not ]
# The head's own forward runs as ever, its hooks included, under a mode that answers `F.linear` onto the vocabulary with
# lazy logits. So a head that is wrapped (LoRA, modules_to_save) or hooked (offloading) is honoured rather than bypassed,
# or its operations are refused. Nothing stays on the head between forwards: whoever wraps, replaces or saves it, finds
# what the model's author put there.


def find_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Path and module of what maps hidden states to the vocabulary; several where the model has a list of them.

    Raises:
        FusedLossError: it cannot be found, or has no weight ``[vocab, hidden_size]``.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kind = type(model).__name__
    if head is None:
        inner = "module" if hasattr(model, "module") else "_orig_mod" if hasattr(model, "_orig_mod") else None
        remedy = f"give use_fused_loss model.{inner}" if inner else "compute its loss with ac_loss.linear_cross_entropy"
        raise FusedLossError(f"{kind}: get_output_embeddings() names no module that makes its logits; {remedy}")
    heads = list(head) if isinstance(head, nn.ModuleList) else [head]
    paths = {id(module): path for path, module in model.named_modules()}
    return {paths[id(module)]: module for module in heads}


def vocab_size(head: nn.Module) -> int | None:
    """Rows of the head's weight; None where it has none of the shape ``[vocab, hidden_size]``."""
    weight = getattr(head, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else None


@contextmanager
def lazy_heads(model: nn.Module, heads: dict[str, nn.Module], origin: Origin) -> Iterator[None]:
    """While it lasts, a forward of any of `heads` gives lazy logits."""
    replaced = {path: head.__dict__.get("forward") for path, head in heads.items()}
    for path, head in heads.items():
        head.__dict__["forward"] = _lazy_forward(model, path, head, origin)
    try:
        yield
    finally:
        for path, head in heads.items():
            if replaced[path] is None:
                del head.__dict__["forward"]
            else:
                head.__dict__["forward"] = replaced[path]


def _lazy_forward(model: nn.Module, path: str, head: nn.Module, origin: Origin) -> Callable[..., Any]:
    original = head.__dict__.get("forward") or type(head).forward.__get__(head)

    def forward(*args: Any, **kwargs: Any) -> Any:
        units = _fsdp_units(model, path)
        origin.sharded |= bool(units)
        origin.unit = units[-1] if units and units[-1] is not model else None
        with _LazyLinear(vocab_size(head), origin):
            logits = original(*args, **kwargs)
        if not isinstance(logits, LazyLogits):
            price = f": {cost(logits.shape)}" if isinstance(logits, Tensor) else ""
            raise FusedLossError(
                f"{origin.model}: its head '{path}' ({type(head).__name__}) does not multiply by F.linear, and made "
                f"logits in full{price}. The fused loss cannot be used with such a head (a quantized one?): take it off "
                "with ac_loss.huggingface.remove_fused_loss(model)"
            )
        return logits

    return forward


class _LazyLinear(TorchFunctionMode):
    """Answers `F.linear` with a weight of `vocab` rows by lazy logits."""

    def __init__(self, vocab: int | None, origin: Origin) -> None:
        super().__init__()
        self.vocab = vocab
        self.origin = origin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear:
            return func(*args, **kwargs)
        hidden, weight, bias = _linear_arguments(*args, **kwargs)
        if weight.dim() != 2 or weight.shape[0] != self.vocab:
            return func(*args, **kwargs)
        return lazy_linear(hidden, weight, bias, self.origin)


def _linear_arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def lazy_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, origin: Origin) -> LazyLogits:
    """``F.linear`` that is not computed."""
    for name, tensor in {"input": hidden, "weight": weight}.items():
        if _is_dtensor(tensor):
            raise FusedLossError(
                f"{origin.model}: the {name} of its head is a DTensor (placements {tensor.placements}). Shard the head "
                "with FSDP2 (fully_shard), which gathers it in its forward, or leave it out of the parallelize plan"
            )
    if hidden.shape[-1] != weight.shape[1]:
        F.linear(hidden, weight, bias)  # raises as it does without the fused loss
    device = hidden.device.type
    autocast = None
    if hidden.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    for tensor in (weight, bias):
        if tensor is not None:
            origin.keep(tensor)
    origin.made += 1
    dtype = autocast or hidden.dtype
    expression = Expression(hidden=(hidden,), weight=(weight,), bias=bias, dtype=dtype, autocast=autocast)
    return LazyLogits(expression, origin)


def _is_dtensor(tensor: Tensor) -> bool:
    # Nobody holds a DTensor without this module loaded.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _fsdp_units(model: nn.Module, path: str) -> list[nn.Module]:
    """The FSDP2 units from the model down to the head at `path`."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return []
    steps = path.split(".") if path else []
    on_path = [model.get_submodule(".".join(steps[:count])) for count in range(len(steps) + 1)]
    return [step for step in on_path if isinstance(step, module.FSDPModule)]
