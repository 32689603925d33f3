"""One forward and backward of a model on a batch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy

from ac_core.errors import ActivationCheckpointingError

Loss = Callable[[Any], Tensor]
"""From the output of the model to what is differentiated."""


@dataclass
class Forward:
    """What a forward leaves for the backward: of the tensors that it starts from, the place in the graph alone.

    So the output of the model can be dropped before the backward, as a training loop drops it.
    """

    starts: list[tuple[GradientEdge, torch.Size, torch.dtype, torch.device]]

    def backward(self) -> None:
        """Accumulate gradients, once. The cotangent of a scalar is 1; any other is a fixed wave over its elements.

        A wave and not ones: the sum over the output of a LayerNorm or a softmax is a constant, without a gradient.
        """
        edges = [edge for edge, *_ in self.starts]
        cotangents = [_wave(shape, dtype, device) for _, shape, dtype, device in self.starts]
        self.starts = []
        torch.autograd.backward(edges, cotangents)


def run_forward(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[Forward, dict[str, Tensor]]:
    """Call the model, and choose what the backward starts from.

    That is what `loss` makes of the output; else `output.loss` or `output["loss"]`; else an output that is a scalar;
    else every floating-point tensor of the output that needs a gradient.

    Returns:
        What the backward needs, and the tensors that it starts from by name (`loss`, or their place in the output).

    Raises:
        TypeError: `batch` is no mapping, tuple, list or tensor; `loss` does not return a tensor.
        ActivationCheckpointingError: nothing in the output needs a gradient.
    """
    with torch.enable_grad():
        starts = _starts(_call(model, batch), loss)
    starts = {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in starts.items()}
    edges = [(get_gradient_edge(t), t.shape, t.dtype, t.device) for t in starts.values()]
    return Forward(edges), {name: tensor.detach() for name, tensor in starts.items()}


def check_model(model: nn.Module) -> None:
    """Refuse what no step can be run of.

    Raises:
        TypeError: `model` is no module.
        ActivationCheckpointingError: it has parameters that get their shape in the first forward.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module")
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise ActivationCheckpointingError(
            f"parameter '{lazy}' has no shape before the first forward, which would change the model; run one first"
        )


def copy_batch(batch: Any) -> Any:
    """The batch with every tensor in it copied to a leaf of its own, so that a step cannot change the caller's.

    Tuples, lists and mappings are rebuilt; anything else that may hold a tensor is passed on as it is.
    """
    copies: dict[int, Tensor] = {}  # one tensor under two names stays one

    def copy(value: Any, *, top: bool = False) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
            return copies[id(value)]
        if type(value) in (list, tuple) or (top and isinstance(value, list | tuple)):
            return [copy(item) for item in value] if isinstance(value, list) else tuple(map(copy, value))
        if type(value) is dict or (top and isinstance(value, Mapping)):
            return {key: copy(item) for key, item in value.items()}
        return value

    return copy(batch, top=True)


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, by its path: `output.logits`, `output.1`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from named_tensors(item, f"{name}.{place}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from named_tensors(getattr(value, field.name, None), f"{name}.{field.name}")


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    if isinstance(batch, Tensor):
        return model(batch)
    raise TypeError(
        f"batch: {type(batch).__name__} is not a mapping of keyword arguments, a tuple or list of positional ones, or "
        "one tensor"
    )


def _starts(output: Any, loss: Loss | None) -> dict[str, Tensor]:
    if loss is not None:
        found = {"loss": loss(output)}
        if not isinstance(found["loss"], Tensor):
            raise TypeError(f"loss: it returned {type(found['loss']).__name__}, not a tensor")
    elif isinstance(own := getattr(output, "loss", None), Tensor):
        found = {"loss": own}
    elif isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        found = {"loss": output["loss"]}
    elif isinstance(output, Tensor) and output.dim() == 0:
        found = {"loss": output}
    else:
        found = dict(named_tensors(output, "output"))
    starts = {name: tensor for name, tensor in found.items() if tensor.requires_grad}
    if not starts:
        what = "the loss" if "loss" in found else f"no tensor in the output ({type(output).__name__})"
        raise ActivationCheckpointingError(
            f"there is nothing to differentiate: {what} {'does not need' if 'loss' in found else 'needs'} a gradient; "
            "pass loss=, a function of the output, or let a parameter or an input require a gradient"
        )
    return starts


def _wave(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    if shape.numel() == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.arange(shape.numel(), device=device, dtype=torch.float32).cos_().to(dtype).reshape(shape)
