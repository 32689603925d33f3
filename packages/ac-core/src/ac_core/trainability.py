"""What needs a gradient: block by block, for the report when checkpointing is applied and again in each forward.

A frozen tower saves nothing for backward, and a region around it would only hold its inputs. It saves as much as any
other once an adapter is added, it is unfrozen, or a trainable module stands in front of it. None of that is known when
checkpointing is applied. So frozen blocks are attached to like all others and reported as left out, and any block opens
a region only in a forward in which something in sight needs a gradient.
"""

from collections.abc import Iterable

from torch import Size, Tensor, device, dtype, nn

from ac_core.discovery.blocks import Block
from ac_core.discovery.parts import LANGUAGE, part_of

FROZEN = "frozen: nothing in this part so far needs a gradient, so it saves nothing (checkpointed once something does)"

_WITHOUT_TENSORS = (type(None), bool, int, float, complex, str, bytes, Size, dtype, device)


def frozen_blocks(model: nn.Module, blocks: Iterable[Block]) -> set[str]:
    """Names of the blocks that no gradient reaches, by the order in which modules are registered.

    In a part, those are the blocks before its first trainable parameter. None of the language part: what other parts
    learn flows back through its blocks, trainable or not.
    """
    order = {}
    first: dict[str, int] = {}
    for place, (name, parameter) in enumerate(model.named_parameters()):
        order[id(parameter)] = place
        if parameter.requires_grad:
            first.setdefault(part_of(model, name), place)
    return {
        block.name
        for block in blocks
        if block.part != LANGUAGE
        and max((order.get(id(p), 0) for p in block.module.parameters()), default=-1)
        < first.get(block.part, len(order))
    }


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
