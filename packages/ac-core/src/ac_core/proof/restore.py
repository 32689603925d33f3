"""A model and the random-number generators as they were before a step, and putting them back."""

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ac_core.errors import ActivationCheckpointingError
from ac_core.proof.meters import is_fake

_PLAIN = (bool, int, float, str, Tensor, type(None))
"""Kinds of attributes that a forward may count or keep something in."""

_MISSING = object()


@contextmanager
def restored(model: nn.Module) -> Iterator["Before"]:
    """Run steps of `model` from gradients that are `None`, and leave everything as it was, also after an error.

    Put back are gradients, buffers, plain attributes of the modules (counters, flags, cached tensors), and the state of
    the generators: torch's on the CPU and on the devices of the model, those that are attributes of a module, Python's
    and NumPy's. Parameters are not copied.

    Raises:
        ActivationCheckpointingError: the step changed a parameter, which cannot be undone.
    """
    reshard(model)
    torch.clear_autocast_cache()  # else, inside the caller's autocast, the second step would find weights cast
    parameters = [(name, p, p._version) for name, p in model.named_parameters()]
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for _, p, _ in parameters]
    before = Before(model)
    for p, _, _ in gradients:
        p.grad = None
    try:
        yield before
    finally:
        reshard(model)
        for p, gradient, value in gradients:
            p.grad = gradient
            if gradient is not None and value is not None:
                _write(gradient, value)  # the object may be a view of a bucket of DDP's, which the step has filled
        before.put_back()
    for name, p, version in parameters:
        if p._version != version:
            raise ActivationCheckpointingError(
                f"parameter '{name}' was changed in place by a forward and backward (by an optimizer that steps in a "
                "backward hook, by Embedding(max_norm=...)), and stays so; measure and verify the model without that"
            )


def reshard(model: nn.Module) -> None:
    """Have FSDP2 show its sharded parameters: after a forward without a backward, some are still gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


class Before:
    """The buffers and plain attributes of the modules, and the generators, at the time it is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = {place.key: place for place in _places(model)}
        tensors = {id(p.value): p.value for p in self._places.values() if isinstance(p.value, Tensor)}
        self._copies = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        self._generators = random_states(model)
        self._hooks = [(hooks, set(hooks)) for module in model.modules() for hooks in _hooks_of(module)]

    def changes(self) -> dict[str, Any]:
        """By path: every buffer as it is now, and the plain attributes that have changed. Tensors are copied."""
        return {
            place.name: place.value.detach().clone() if isinstance(place.value, Tensor) else place.value
            for place in _places(self._model)
            if place.is_buffer or not self._is_as_before(place)
        }

    def put_back(self) -> None:
        for place in _places(self._model):
            if place.key not in self._places:
                del place.holder[place.attribute]
        for place in self._places.values():
            now = place.holder.get(place.attribute, _MISSING)
            if now is not place.value and (now is _MISSING or isinstance(now, _PLAIN)):
                place.holder[place.attribute] = place.value
            if isinstance(place.value, Tensor):
                _write(place.value, self._copies[id(place.value)])
        generators = _generators(self._model)
        for name, state in self._generators.items():
            generators[name][1](state)
        # A library may install hooks in the first forward and note in an attribute that it has: both go, or neither.
        for hooks, before in self._hooks:
            for handle in [handle for handle in hooks if handle not in before]:
                del hooks[handle]

    def _is_as_before(self, now: "_Place") -> bool:
        before = self._places.get(now.key)
        if before is None or before.value is not now.value:
            return before is not None and not isinstance(now.value, Tensor) and before.value == now.value
        return not isinstance(now.value, Tensor) or same_bits(now.value, self._copies[id(now.value)])


@dataclass(frozen=True)
class _Place:
    """Where a buffer or attribute stands, and the object that is there."""

    name: str
    holder: dict[str, Any]
    attribute: str
    value: Any
    is_buffer: bool

    @property
    def key(self) -> tuple[int, str]:
        return id(self.holder), self.attribute


def _places(model: nn.Module) -> list[_Place]:
    found = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found += [_Place(prefix + k, module._buffers, k, v, True) for k, v in module._buffers.items()]
        if not _is_torchs_own(module):
            attributes = module.__dict__
            found += [_Place(prefix + k, attributes, k, v, False) for k, v in attributes.items() if _is_plain(v)]
    return found


def _hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    # Nothing public lists the hooks of a module.
    return [
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN)


def _is_torchs_own(module: nn.Module) -> bool:
    # Layers of torch keep their state in buffers. Its wrappers keep the progress of training in attributes, which must
    # not be turned back. A class that FSDP2 has extended is still the user's.
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return True
    return all(kind.__module__.partition(".")[0] in ("torch", "builtins") for kind in type(module).__mro__)


def _write(tensor: Tensor, value: Tensor) -> None:
    # Only where it is needed: a write counts as a change of what an autograd graph may have saved.
    if not is_fake(tensor) and not same_bits(tensor, value):
        with torch.no_grad():
            tensor.detach().copy_(value)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits, on this rank."""
    left, right = local(left), local(right)
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, a sparse tensor as a dense one; else the tensor itself. Detached."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def random_states(model: nn.Module) -> dict[str, Any]:
    """The state of every generator that a step of `model` may draw from, by the name of the generator."""
    return {name: get() for name, (get, _) in _generators(model).items()}


def same_state(left: object, right: object) -> bool:
    """Whether two states of one generator are the same."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return pickle.dumps(left) == pickle.dumps(right)


def _generators(model: nn.Module) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """`{name: (read the state, set it)}`."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "cpu": (torch.get_rng_state, torch.set_rng_state),
        "python": (random.getstate, random.setstate),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = (numpy.random.get_state, numpy.random.set_state)
    for device in sorted({t.device for t in (*model.parameters(), *model.buffers())}, key=str):
        if device.type not in ("cpu", "meta") and (module := torch.get_device_module(device)).is_available():
            found[str(device)] = (
                lambda module=module, device=device: module.get_rng_state(device),
                lambda state, module=module, device=device: module.set_rng_state(state, device),
            )
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Generator):
                found[f"{path}.{name}" if path else name] = (value.get_state, value.set_state)
    return found
