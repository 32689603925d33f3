"""The random-number generators of one rank."""

import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators for the CPU and, on a GPU, for `device`: uint8, on the CPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Put back what `rng_state` gave."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
