"""What the forward of a module changes besides its result: a recompute that jumps over it would leave that out."""

from typing import Any

from torch import Tensor, nn

from ac_core.selective.tensors import version

State = dict[str, tuple[Any, int]]
_STRUCTURE = ("_parameters", "_modules", "_buffers")


def state_of(module: nn.Module) -> State:
    """The attributes and buffers inside `module`, by path, each with how often it was written to, if a tensor."""
    state = {}
    for path, inner in module.named_modules():
        for name, value in (*inner.__dict__.items(), *inner._buffers.items()):
            if name not in _STRUCTURE:
                state[f"{path}.{name}" if path else name] = value, version(value) if isinstance(value, Tensor) else 0
    return state


def changed_since(before: State, module: nn.Module) -> str | None:
    """The path of the first attribute or buffer that is no longer as it was, if any."""
    after, absent = state_of(module), (None, -1)
    for path in (*after, *before):
        (value, writes), (was, writes_before) = after.get(path, absent), before.get(path, absent)
        if value is not was or writes != writes_before:
            return path
    return None
