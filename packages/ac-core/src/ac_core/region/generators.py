"""Generators of random numbers: their state, whatever their kind.

torch's checkpoint replays the default generator of the CPU and those of the devices that the inputs of a region lie on.
This module covers the others.
"""

import random
import sys
from typing import Any

import torch


def is_generator(value: object) -> bool:
    """Whether `value` is a private generator of torch, Python or NumPy."""
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)  # which has no state
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def state_of(generator: Any) -> Any:
    """The state of a generator; `set_state` puts it back."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
