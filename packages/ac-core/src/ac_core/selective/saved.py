"""What autograd saves inside a kept call, and what becomes of it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ac_core.errors import ActivationCheckpointingError

# NOTE [ Kept calls ]
# A checkpoint region drops every tensor that its forward saves and gets it back from a recompute. A kept call is an
# exception inside of the region: it runs under saved-tensor hooks of its own, which hide its saves from those of the
# region. Its autograd nodes, those of the forward, stay alive with what they saved, exactly as without checkpointing;
# the recompute does not make the call at all but goes on from its kept output. So
# 1. no kernel runs twice, and nothing stands between the forward's node and its gradient: results are bit-equal;
# 2. both passes hide the same saves, so region and recompute agree about the number and the order of the rest;
# 3. what the call saved of its *inputs* need not be kept, since the recompute makes these again on its way. They are
#    handed to the region instead (`_Handed`), which keeps no bytes for them.
# What is kept in the end is the output, and what the call saved of neither inputs nor parameters (a log-sum-exp).


class CallSaves:
    """The saved-tensor hooks of one kept call.

    inputs: the tensors that the call was given. held: bytes that it keeps for backward of neither inputs nor
    parameters, by storage.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        self._inputs = inputs
        self._keys = [storage_key(tensor) for tensor in inputs]
        self._handed: dict[int, _Handed] = {}
        self.held: dict[int, int] = {}

    def hooks(self) -> saved_tensors_hooks:
        """The context to make the call in."""
        return saved_tensors_hooks(self._pack, _unpack)

    def hand_over(self) -> tuple[int, ...]:
        """Gives the region what was saved of inputs; returns which they were. To be called after the call, under the
        hooks of the region. From then on the inputs themselves are not held."""
        for index, handed in self._handed.items():
            handed.node = hand_to_region(self._inputs[index])
        used = tuple(self._handed)
        self._inputs, self._keys, self._handed = [], [], {}
        return used

    def _pack(self, tensor: Tensor) -> Any:
        if _is_parameter(tensor):
            return tensor, tensor._version
        key = storage_key(tensor)
        for index, (given, given_key) in enumerate(zip(self._inputs, self._keys, strict=True)):
            if given_key == key and given.dtype == tensor.dtype and type(given) is type(tensor):
                handed = self._handed.get(index)
                if handed is None:
                    handed = self._handed[index] = _Handed(given._version)
                handed.uses += 1
                return handed, None if given is tensor else _Geometry.of(tensor)
        if not _is_parameter(tensor._base):
            self.held[key] = storage_bytes(tensor)
        # Detached: the output of a node, saved by that node, would keep itself alive.
        return tensor.detach(), tensor._version


def _unpack(packed: tuple[Any, Any]) -> Tensor:
    tensor, extra = packed
    if isinstance(tensor, _Handed):
        return tensor.take(extra)
    if tensor._version != extra:
        raise ActivationCheckpointingError(
            f"a tensor of shape {tuple(tensor.shape)} that is needed for the gradient was modified in place after the "
            "forward had saved it; make the change out of place"
        )
    return tensor


class _Handed:
    """An input of a kept call that the region gives back in the backward."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.node: Any = None
        self.uses = 0
        self._taken = 0
        self._value: Tensor | None = None

    def take(self, geometry: "_Geometry | None") -> Tensor:
        if self._value is None:
            (self._value,) = self.node.saved_tensors  # may run the recompute
        value = self._value
        self._taken += 1
        if self._taken == self.uses:  # a second backward asks the region again
            self._taken, self._value = 0, None
        return value if geometry is None else geometry.view(value)


class _HandedNode(torch.autograd.Function):
    """Saves a tensor in the region and is in nobody's way: no gradient ever flows through it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


_ANCHOR = torch.empty(0, requires_grad=True)  # makes autograd save, whether the tensor itself needs a gradient or not


def hand_to_region(tensor: Tensor) -> Any:
    """Lets the region save `tensor`; the node from which it can be taken back, once in a backward."""
    return _HandedNode.apply(_ANCHOR, tensor.detach()).grad_fn


class discarded(saved_tensors_hooks):  # noqa: N801 - a context manager, named like its base
    """Runs a kept call again in a recompute: what it saves has been kept by the forward."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, lambda _: None)


def storage_key(tensor: Tensor) -> int:
    """Tells whether two tensors share memory."""
    return _storage(tensor)._cdata


def _is_parameter(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_leaf and tensor.requires_grad


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the memory that `tensor` is in, on this rank."""
    return _storage(tensor).nbytes()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    # A DTensor, a collective under way: their own storage is empty, that of the one tensor that they wrap is not.
    while is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        wrapped = [part for part in parts if isinstance(part, Tensor)]
        if len(wrapped) != 1:
            break
        (tensor,) = wrapped
    return tensor.untyped_storage()


@dataclass(slots=True)
class _Geometry:
    """How a tensor lies in its memory. parts: of a subclass such as DTensor: the tensors that it wraps, and what else it
    consists of, by attribute; context: what it needs besides to be put together again."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int = 0
    parts: "dict[str, _Geometry | Any] | None" = None
    context: Any = None

    @classmethod
    def of(cls, tensor: Tensor) -> "_Geometry":
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
            name: part.view(getattr(value, name)) if isinstance(part, _Geometry) else part
            for name, part in self.parts.items()
        }
        return type(value).__tensor_unflatten__(inner, self.context, self.size, self.stride)
