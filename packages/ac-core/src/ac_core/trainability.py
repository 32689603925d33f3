"""What needs a gradient: part by part when checkpointing is applied, block by block in each forward.

A frozen tower saves nothing for backward, and a region around it would only cost time. It saves as much as any other
once an adapter is added, it is unfrozen, or a trainable module stands in front of it. None of that is known when
checkpointing is applied. So blocks of a frozen part are attached to like all others and reported as left out, and they
open a region only in a forward in which something in sight needs a gradient.
"""

from collections.abc import Iterable

from torch import Size, Tensor, device, dtype, nn

from ac_core.discovery.parts import LANGUAGE, part_of

FROZEN = "frozen: nothing in this part needs a gradient, so it saves nothing (checkpointed once something does)"

_WITHOUT_TENSORS = (type(None), bool, int, float, complex, str, bytes, Size, dtype, device)


def frozen_parts(model: nn.Module, parts: Iterable[str]) -> set[str]:
    """Those of `parts` in which no parameter needs a gradient.

    Never the language part: what other parts learn flows back through its blocks, trainable or not.
    """
    trainable = {part_of(model, name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    return set(parts) - trainable - {LANGUAGE}


def needs_gradient(module: nn.Module, inputs: Iterable[object]) -> bool:
    """Whether the forward of `module` on `inputs` saves activations for a backward.

    True wherever it cannot be told, as for an input of a type that may hold tensors out of sight: a region too many
    costs a little time, one too few the memory that was to be saved.
    """
    return any(map(_may_need_gradient, inputs)) or any(parameter.requires_grad for parameter in module.parameters())


def _may_need_gradient(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(map(_may_need_gradient, value.values()))
    if isinstance(value, _WITHOUT_TENSORS):
        return False
    return not isinstance(value, tuple | list) or any(map(_may_need_gradient, value))
