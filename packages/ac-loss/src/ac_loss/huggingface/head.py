"""The head of a model: where it is, and how its matrix product is left out."""

import sys
import threading
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
from ac_loss.huggingface.origin import GIB, Origin, cost

# NOTE [ The head runs, its product does not ]
# The head's own forward runs as ever, its hooks included, under a mode that answers `F.linear` onto the vocabulary with
# lazy logits. So a head that is wrapped (LoRA, modules_to_save) or hooked (offloading) is honoured rather than
# bypassed, or its operations are refused. Nothing stays on the head between forwards: whoever wraps, replaces or saves
# it, finds what the model's author put there. While it is there, it answers the training forward that put it there and
# nobody else: a forward under no_grad in the midst of it (of a teacher that shares the head) or in another thread is as
# ever.


def find_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Path and module of what maps hidden states to the vocabulary; several where the model has a list of them.

    It is what the model calls its output embeddings, or else what a model inside of it does. Where those are the input
    embeddings themselves, it is the one linear layer with their weight, or with a weight of that shape.

    Raises:
        FusedLossError: there is none.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    named = next((head for module in model.modules() if (head := _output_embeddings(module)) is not None), None)
    found = list(named) if isinstance(named, nn.ModuleList) else [named]
    if isinstance(named, nn.Embedding):
        alike = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape == named.weight.shape]
        found = [m for m in alike if m.weight is named.weight] or alike
        found = found if len(found) == 1 else []
    heads = {paths[id(head)]: head for head in found if id(head) in paths}
    if not heads:
        raise FusedLossError(_no_head(model))
    return heads


def _output_embeddings(module: nn.Module) -> nn.Module | None:
    get = getattr(module, "get_output_embeddings", None)
    try:
        return get() if callable(get) else None
    except (AttributeError, NotImplementedError):  # towers that have none
        return None


def _no_head(model: nn.Module) -> str:
    kind = type(model).__name__
    for inner in ("module", "_orig_mod"):
        if isinstance(getattr(model, inner, None), nn.Module):
            return f"{kind}: is a wrapper; give use_fused_loss the model inside of it, model.{inner}"
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    vocab = getattr(text, "vocab_size", None)
    price = f": {4000 * vocab / GIB:.3g} GiB for 1000 tokens in fp32" if isinstance(vocab, int) else ""
    return (
        f"{kind}: no module found that makes its logits (get_output_embeddings() names none), so they would be "
        f"computed in full{price}. Call ac_loss.linear_cross_entropy with its hidden states and the weight of its head"
    )


def vocab_size(head: nn.Module) -> int | None:
    """Rows of the head's weight; None where it has none of the shape ``[vocab, hidden_size]``."""
    weight = getattr(head, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else None


_TAKING = threading.Lock()


@contextmanager
def lazy_heads(model: nn.Module, heads: dict[str, nn.Module], origin: Origin) -> Iterator[None]:
    """While it lasts, a forward of any of `heads` gives lazy logits."""
    with _TAKING:
        for path, head in heads.items():
            _refuse_taken(path, head, origin)
        replaced = {path: head.__dict__.get("forward") for path, head in heads.items()}
        for path, head in heads.items():
            head.__dict__["forward"] = _LazyForward(model, path, head, origin)
    try:
        yield
    finally:
        for path, head in heads.items():
            if replaced[path] is None:
                del head.__dict__["forward"]
            else:
                head.__dict__["forward"] = replaced[path]


def _refuse_taken(path: str, head: nn.Module, origin: Origin) -> None:
    """Raise for a head that another forward has lazy logits from, or whose hooks wait for their gradient."""
    taken = head.__dict__.get("forward")
    if isinstance(taken, _LazyForward):
        other = taken.origin
        where = "in another thread" if other.thread != origin.thread else "around this one"
        raise FusedLossError(
            f"{origin.model}: its head '{path}' is in use by a training forward of {other.model} {where}, with the "
            "fused loss as well. Of models inside of one another, or with one head, only the outermost can have it "
            "(ac_loss.huggingface.remove_fused_loss(inner)); of threads, one at a time can train a model"
        )
    if head._backward_hooks or head._backward_pre_hooks:
        raise FusedLossError(
            f"{origin.model}: its head '{path}' has a backward hook, which waits for the gradient of the logits, and "
            "the fused loss never makes one. Remove the hook, put it on the module before the head, or take the fused "
            "loss off with ac_loss.huggingface.remove_fused_loss(model)"
        )


class _LazyForward:
    """Stands in for the forward of the head at `path` while a training forward of `model` runs."""

    def __init__(self, model: nn.Module, path: str, head: nn.Module, origin: Origin) -> None:
        self.model, self.path, self.head, self.origin = model, path, head, origin
        self.original: Callable[..., Any] = head.__dict__.get("forward") or type(head).forward.__get__(head)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        origin = self.origin
        if threading.get_ident() != origin.thread or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        units = _fsdp_units(self.model, self.path)
        origin.sharded |= bool(units)
        origin.unit = units[-1] if units and units[-1] is not self.model else None
        with _LazyLinear(vocab_size(self.head), origin):
            logits = self.original(*args, **kwargs)
        if not isinstance(logits, LazyLogits):
            price = f": {cost(logits.shape)}" if isinstance(logits, Tensor) else ""
            raise FusedLossError(
                f"{origin.model}: its head '{self.path}' ({type(self.head).__name__}) does not multiply by F.linear, "
                f"and made logits in full{price}. The fused loss cannot be used with such a head (a quantized one?): "
                "take it off with ac_loss.huggingface.remove_fused_loss(model)"
            )
        return logits


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
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        hidden, weight, bias = named["input"], named["weight"], named.get("bias")
        if weight.dim() != 2 or weight.shape[0] != self.vocab:
            return func(*args, **kwargs)
        return lazy_linear(hidden, weight, bias, self.origin)


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
