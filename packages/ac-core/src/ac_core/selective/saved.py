"""What autograd saves inside a kept call, and what becomes of it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
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
# 4. nor need casts of inputs and parameters, which autocast makes: they are made again from these (`_Cast`).
# What is kept in the end is the output, and what the call saved of neither inputs nor parameters (a log-sum-exp).


class CallSaves:
    """The saved-tensor hooks of one kept call.

    inputs: the tensors that the call was given. held: bytes that it keeps for backward of neither inputs nor
    parameters, by storage.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        self._inputs = inputs
        self._versions = [tensor._version for tensor in inputs]
        self._keys = [storage_key(tensor) for tensor in inputs]
        self._of_inputs: list[tuple[int, int, _Saved]] = []  # which, its version, what was saved of it
        self.held: dict[int, int] = {}

    def hooks(self) -> saved_tensors_hooks:
        """The context to make the call in."""
        return saved_tensors_hooks(self._pack, _Saved.unpack)

    def changed_inputs(self) -> bool:
        """Whether the call has changed one of its inputs in place."""
        return any(tensor._version != version for tensor, version in zip(self._inputs, self._versions, strict=True))

    def hand_over(self) -> tuple[int, ...]:
        """Gives the region what was saved of inputs; returns which they were. To be called after the call, under the
        hooks of the region. From then on the inputs themselves are not held."""
        handed: dict[int, _Handed] = {}
        for index, version, saved in self._of_inputs:
            if self._inputs[index]._version == version:
                source = handed.setdefault(index, _Handed())
                source.uses += 1
                saved.tensor, saved.source = None, source
            else:  # the call has changed the input since: only what was saved tells what it was
                self.held[storage_key(saved.tensor)] = storage_bytes(saved.tensor)
        for index, source in handed.items():
            source.node = hand_to_region(self._inputs[index])
        self._inputs, self._versions, self._keys, self._of_inputs = [], [], [], []
        return tuple(handed)

    def _pack(self, tensor: Tensor) -> "_Saved":
        # Detached: the output of a node, saved by that node, would keep itself alive.
        saved = _Saved(tensor.detach(), tensor._version)
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter):
            return saved
        key = storage_key(tensor)
        for index, (given, given_key) in enumerate(zip(self._inputs, self._keys, strict=True)):
            if given_key == key and _alike(given, tensor):
                saved.geometry = None if given is tensor else _Geometry.of(tensor)
                self._of_inputs.append((index, given._version, saved))
                return saved
        if is_parameter(whole):
            return saved
        source = source_of_cast(tensor, self._inputs)
        if source is None:
            self.held[key] = storage_bytes(tensor)
        else:
            saved.cast = _Cast.to(tensor)
            saved.geometry = None if tensor._base is None else _Geometry.of(tensor)
            if isinstance(source, int):
                self._of_inputs.append((source, self._inputs[source]._version, saved))
            else:
                saved.tensor, saved.source, saved.version = None, source, source._version
        return saved


class _Saved:
    """A tensor that a kept call has saved: itself, or how to have it again.

    source: the input, given back by the region, or the parameter that it is made of. cast: how, where it is a cast of
    that. geometry: where it is a view.
    """

    __slots__ = ("cast", "geometry", "source", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version
        self.source: _Handed | nn.Parameter | None = None
        self.cast: _Cast | None = None
        self.geometry: _Geometry | None = None

    def unpack(self) -> Tensor:
        if self.tensor is not None:
            return self._unchanged(self.tensor)
        source = self.source
        value = source.take() if isinstance(source, _Handed) else self._unchanged(source)
        if self.cast is not None:
            value = self.cast.of(value)
        return value if self.geometry is None else self.geometry.view(value)

    def _unchanged(self, tensor: Tensor) -> Tensor:
        if tensor._version != self.version:
            raise ActivationCheckpointingError(
                f"a tensor of shape {tuple(tensor.shape)} that is needed for the gradient was modified in place after "
                "the forward had saved it; make the change out of place"
            )
        return tensor


class _Handed:
    """An input of a kept call that the region gives back in the backward."""

    def __init__(self) -> None:
        self.node: Any = None
        self.uses = 0
        self._taken = 0
        self._value: Tensor | None = None

    def take(self) -> Tensor:
        if self._value is None:
            (self._value,) = self.node.saved_tensors  # may run the recompute
        value = self._value
        self._taken += 1
        if self._taken == self.uses:  # a second backward asks the region again
            self._taken, self._value = 0, None
        return value


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
    with torch.enable_grad():
        return _HandedNode.apply(_ANCHOR, tensor.detach()).grad_fn


class discarded(saved_tensors_hooks):  # noqa: N801 - a context manager, named like its base
    """Runs a kept call again in a recompute: what it saves has been kept by the forward."""

    def __init__(self) -> None:
        # Kept for as long as its result is: the block may ask for a gradient inside of its forward.
        super().__init__(lambda tensor: tensor.detach(), lambda tensor: tensor)


def is_parameter(tensor: Tensor) -> bool:
    """A parameter, frozen or not, or a leaf that stands in for one, as in `torch.func.functional_call`."""
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def source_of_cast(tensor: Tensor, inputs: list[Tensor]) -> int | nn.Parameter | None:
    """What `tensor` is nothing but a cast of, to another dtype, or a view of such a cast: the index of an input, or a
    parameter. Autograd tells, so None where the source needs no gradient."""
    whole = tensor if tensor._base is None else tensor._base
    node = whole.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or whole._version or type(whole) is not Tensor:
        return None
    node, output = node.next_functions[0]
    of = getattr(node, "variable", None)  # of a leaf, its own node
    for index, given in enumerate(inputs):
        same = of is given if of is not None else given.grad_fn is node and given.output_nr == output
        if same and type(given) in (Tensor, nn.Parameter):
            return index
    return of if type(of) is nn.Parameter else None


def _alike(given: Tensor, tensor: Tensor) -> bool:
    """Whether `tensor`, in the memory of `given`, is a view that strides can describe."""
    if tensor is given:
        return True
    return (
        given.dtype == tensor.dtype
        and type(given) is type(tensor)
        and given.layout == tensor.layout == torch.strided
        and given.is_conj() == tensor.is_conj()
        and given.is_neg() == tensor.is_neg()
    )


def storage_key(tensor: Tensor) -> int:
    """Tells whether two tensors share memory. One without a memory of its own, such as a sparse one, is its own key."""
    try:
        return _storage(tensor)._cdata
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the memory that `tensor` is in, on this rank."""
    try:
        return _storage(tensor).nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()


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
class _Cast:
    """A cast of a tensor, to be made again."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def to(cls, tensor: Tensor) -> "_Cast":
        whole = tensor if tensor._base is None else tensor._base
        return cls(whole.size(), whole.stride(), whole.dtype)

    def of(self, source: Tensor) -> Tensor:
        result = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=source.device)
        return result.copy_(source.detach())


@dataclass(slots=True)
class _Geometry:
    """How a tensor lies in its memory. parts: of a subclass such as DTensor: the tensors that it wraps, and what else
    it consists of, by attribute; context: what it needs besides to be put together again."""

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
