"""What a tensor is besides its values: a view, a cast, a part of a distributed one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storage_key(tensor: Tensor) -> int:
    """Tells whether two tensors share memory. One without a memory of its own, such as a sparse one, is its own key."""
    try:
        return on_this_rank(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the memory that `tensor` is in, on this rank."""
    try:
        return on_this_rank(tensor).untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()


def on_this_rank(tensor: Tensor) -> Tensor:
    """The plain tensor inside of a subclass that wraps one, such as a DTensor, or a collective under way."""
    while is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        wrapped = [part for part in parts if isinstance(part, Tensor)]
        if len(wrapped) != 1:
            break
        (tensor,) = wrapped
    return tensor


def version(tensor: Tensor) -> int:
    """How often `tensor` was written to in place. One made in inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


def whole(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def is_parameter(tensor: Tensor) -> bool:
    """A parameter, frozen or not, or a leaf that stands in for one, as in `torch.func.functional_call`."""
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def source_of_cast(tensor: Tensor, inputs: list[Tensor]) -> int | nn.Parameter | None:
    """What `tensor` is nothing but a cast of, to another dtype, or a view of such a cast: the index of an input, or a
    parameter. Autograd tells, so None where the source needs no gradient."""
    cast = whole(tensor)
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or cast._version or type(cast) is not Tensor:
        return None
    node, output = node.next_functions[0]
    leaf = getattr(node, "variable", None)
    for index, given in enumerate(inputs):
        same = leaf is given if leaf is not None else given.grad_fn is node and given.output_nr == output
        if same and type(given) in (Tensor, nn.Parameter):
            return index
    return leaf if type(leaf) is nn.Parameter else None


@dataclass(slots=True)
class Cast:
    """A cast of a tensor, to be made again."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def to(cls, tensor: Tensor) -> "Cast":
        cast = whole(tensor)
        return cls(cast.size(), cast.stride(), cast.dtype)

    def of(self, source: Tensor) -> Tensor:
        result = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=source.device)
        return result.copy_(source.detach())


@dataclass(slots=True)
class Geometry:
    """How a tensor lies in its memory. parts: of a subclass such as DTensor: the tensors that it wraps, and what else
    it consists of, by attribute; context: what it needs besides to be put together again."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int = 0
    parts: "dict[str, Geometry | Any] | None" = None
    context: Any = None

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        if not is_traceable_wrapper_subclass(tensor):
            return cls(tensor.size(), tensor.stride(), tensor.storage_offset())
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        inner = {name: cls.of(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
        return cls(tensor.size(), tensor.stride(), parts=inner, context=context)

    def view(self, value: Tensor) -> Tensor:
        """The tensor that lies so in the memory of `value`."""
        if self.parts is None:
            return value.as_strided(self.size, self.stride, self.offset)
        inner = {
            name: part.view(getattr(value, name)) if isinstance(part, Geometry) else part
            for name, part in self.parts.items()
        }
        return type(value).__tensor_unflatten__(inner, self.context, self.size, self.stride)
