"""What autograd saves inside a kept call, and what becomes of it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ac_core.errors import ActivationCheckpointingError
from ac_core.region.tracing import never_compiled
from ac_core.selective.tensors import (
    Cast,
    Geometry,
    is_parameter,
    source_of_cast,
    storage_bytes,
    storage_key,
    version,
    whole,
)

# NOTE [ Kept calls ]
# A checkpoint region drops every tensor that its forward saves and gets it back from a recompute. A kept call is an
# exception inside of the region: it runs under saved-tensor hooks of its own, which hide its saves from those of the
# region. Its autograd nodes, those of the forward, stay alive with what they saved, exactly as without checkpointing;
# the recompute does not make the call at all but goes on from its kept output. So
# 1. no kernel runs twice, and nothing stands between the forward's node and its gradient: results are bit-equal;
# 2. both passes hide the same saves, so region and recompute agree about the number and the order of the rest;
# 3. what the call saved of its *inputs* need not be kept, since the recompute makes these again on its way. They are
#    handed to the region instead (`_Handed`), which keeps no bytes for them.
# 4. nor need casts of inputs and parameters, which autocast makes: they are made again from these (`Cast`).
# What is kept in the end is the output, and what the call saved of neither inputs nor parameters (a log-sum-exp).


class CallSaves:
    """The saved-tensor hooks of one kept call.

    inputs: the tensors that the call was given. held: bytes that it keeps for backward of neither inputs nor
    parameters, by storage.
    """

    @never_compiled
    def __init__(self, inputs: list[Tensor]) -> None:
        self._inputs = inputs
        self._versions = [version(tensor) for tensor in inputs]
        self._keys = [storage_key(tensor) for tensor in inputs]
        self._of_inputs: list[tuple[int, int, _Saved]] = []  # which, its version, what was saved of it
        self.held: dict[int, int] = {}

    def hooks(self) -> saved_tensors_hooks:
        """The context to make the call in."""
        return saved_tensors_hooks(self._pack, _Saved.unpack)

    @never_compiled
    def changed_inputs(self) -> bool:
        """Whether the call has changed one of its inputs in place."""
        return self._versions != [version(tensor) for tensor in self._inputs]

    @never_compiled
    def hand_over(self) -> tuple[int, ...]:
        """Gives the region what was saved of inputs; returns which they were. To be called after the call, under the
        hooks of the region. From then on the inputs themselves are not held."""
        handed: dict[int, _Handed] = {}
        for index, then, saved in self._of_inputs:
            if self._inputs[index]._version == then:
                source = handed.setdefault(index, _Handed())
                source.uses += 1
                saved.tensor, saved.source = None, source
            else:  # the call has changed the input since: only what was saved tells what it was
                self.held[storage_key(saved.tensor)] = storage_bytes(saved.tensor)
        for index, source in handed.items():
            source.node = hand_to_region(self._inputs[index])
        self._inputs, self._versions, self._keys, self._of_inputs = [], [], [], []
        return tuple(handed)

    @never_compiled
    def _pack(self, tensor: Tensor) -> "_Saved":
        # Detached: the output of a node, saved by that node, would keep itself alive.
        saved = _Saved(tensor if tensor.is_leaf else tensor.detach())
        if isinstance(whole(tensor), nn.Parameter):
            return saved
        key = storage_key(tensor)
        for index, (given, given_key) in enumerate(zip(self._inputs, self._keys, strict=True)):
            if given_key == key and _alike(given, tensor):
                saved.geometry = None if given is tensor else Geometry.of(tensor)
                self._of_inputs.append((index, given._version, saved))
                return saved
        if is_parameter(whole(tensor)):
            return saved
        source = source_of_cast(tensor, self._inputs)
        if source is None:
            self.held[key] = storage_bytes(tensor)
        else:
            saved.cast = Cast.to(tensor)
            saved.geometry = None if tensor._base is None else Geometry.of(tensor)
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

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.source: _Handed | nn.Parameter | None = None
        self.cast: Cast | None = None
        self.geometry: Geometry | None = None

    @never_compiled
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


@never_compiled
def hand_to_region(tensor: Tensor) -> Any:
    """Lets the region save `tensor`; the node from which it can be taken back, once in a backward."""
    with torch.enable_grad():
        return _HandedNode.apply(_ANCHOR, tensor.detach()).grad_fn


class discarded(saved_tensors_hooks):  # noqa: N801 - a context manager, named like its base
    """Runs a kept call again in a recompute: what it saves has been kept by the forward."""

    def __init__(self) -> None:
        # Kept for as long as its result is: the block may ask for a gradient inside of its forward.
        super().__init__(lambda tensor: tensor.detach(), lambda tensor: tensor)


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
