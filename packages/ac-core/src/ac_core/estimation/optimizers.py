"""Optimizers by name."""

from functools import partial

import torch

from ac_core.estimation.simulate import Optimizer

_NAMES = ("adamw", "sgd", "sgd+momentum", "none")


def optimizer_factory(optimizer: "str | Optimizer | None", device: str) -> Optimizer | None:
    """What builds the optimizer of that name, as it is on that device; a factory is passed on.

    On CUDA torch's optimizers step on all parameters at once, and need memory for that; on the CPU on one at a time.

    Raises:
        ValueError: there is none of that name.
    """
    if optimizer is None or callable(optimizer):
        return optimizer
    if optimizer not in _NAMES:
        raise ValueError(
            f"optimizer: {optimizer!r} is not one of {', '.join(map(repr, _NAMES))}, and no function that takes a list "
            "of parameters and returns an optimizer"
        )
    several = device == "cuda"
    if optimizer == "none":
        return None
    if optimizer == "adamw":
        return partial(torch.optim.AdamW, foreach=several)
    return partial(torch.optim.SGD, lr=1e-3, momentum=0.9 if optimizer == "sgd+momentum" else 0.0, foreach=several)
