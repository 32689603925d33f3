"""The states of the random-number generators that a call may draw from."""

from typing import Any

import torch
from torch import Tensor


class RandomState:
    """The state of the CPU's generator and of those of the devices that some tensors are on."""

    def __init__(self, states: list[tuple[torch.device | None, Tensor]]) -> None:
        self._states = states

    @classmethod
    def of(cls, tensors: list[Tensor]) -> "RandomState":
        devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        states: list[tuple[torch.device | None, Tensor]] = [(None, torch.get_rng_state())]
        states += [(device, _module(device).get_rng_state(device)) for device in sorted(devices, key=str)]
        return cls(states)

    def restore(self) -> None:
        for device, state in self._states:
            if device is None:
                torch.set_rng_state(state)
            else:
                _module(device).set_rng_state(state, device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and all(
            mine == theirs and torch.equal(a, b)
            for (mine, a), (theirs, b) in zip(self._states, other._states, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)
