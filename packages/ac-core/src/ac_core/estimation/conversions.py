"""`Module.to` and its kin, and `copy.deepcopy`, for modules of fake tensors.

PyTorch converts a fake parameter by swapping it with another tensor, which it refuses where anything refers to one of
them weakly, as the fake mode itself does. So no function that builds a model could call `.to(torch.bfloat16)`, or move
it to where it is.

It copies a fake tensor with all of its attributes, the fake mode among them, which holds tensors of its own. So what a
function copied, as `torch.nn.TransformerEncoder` does its layers, would be there twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


class _Replaced:
    """What is replaced while any thread is inside. inside: how many are."""

    lock = Lock()
    inside = 0
    original = nn.Module._apply


@contextmanager
def conversions_of_fakes() -> Iterator[None]:
    """Inside of the context, conversions of modules give fake parameters other data, as they do to real ones, and a
    copy of a fake tensor is a tensor of the same fake mode.

    All conversions go through `Module._apply`, which has no public counterpart. It is replaced for all threads, from
    the first that enters to the last that leaves.
    """
    with _Replaced.lock:
        if not _Replaced.inside:
            _Replaced.original, nn.Module._apply = nn.Module._apply, _apply  # type: ignore[method-assign]
            FakeTensor.__deepcopy__ = _copied  # type: ignore[method-assign]
        _Replaced.inside += 1
    try:
        yield
    finally:
        with _Replaced.lock:
            _Replaced.inside -= 1
            if not _Replaced.inside:
                nn.Module._apply = _Replaced.original  # type: ignore[method-assign]
                del FakeTensor.__deepcopy__  # and it is Tensor's again


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    own = [*module._parameters.items()]
    if not any(isinstance(parameter, FakeTensor) for _, parameter in own):
        return _Replaced.original(module, fn, recurse)
    for child in module.children() if recurse else ():
        child._apply(fn)
    for name, parameter in own:
        if parameter is not None:
            with torch.no_grad():
                converted = fn(parameter)
            if converted.device == parameter.device:
                parameter.data = converted
            else:
                module._parameters[name] = nn.Parameter(converted, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if tensor.grad_fn is not None:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol at the moment")
    made: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    parameter = isinstance(tensor, nn.Parameter)
    made = nn.Parameter(made, tensor.requires_grad) if parameter else made.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    return made
