"""A block cut around its attention, for models whose key/value cache stays on.

Attention that runs once appends its keys once: it stays outside every region and keeps what it saves. The other
children of the block, its norms and MLPs, become regions of their own and keep one input each. That is 3 to 6 times the
memory of a whole block (Gemma3n, Gemma4), so it is for where the cache has to stay (:mod:`ac_core.region.cache`).
"""

from collections.abc import Iterator

from torch import nn

from ac_core.region.cache import takes_cache

_KEEP_THEIR_INPUT_ALONE = (nn.Linear.forward, nn.Embedding.forward, nn.LayerNorm.forward)
"""A region around one of these would keep the same tensor and run it again for nothing. Compared by forward: FSDP2
makes a class of its own from the one that it finds."""


def submodules_beside_attention(name: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules inside `block` that can be run again while a cache is on, with their full names.

    Attention is what takes a cache and holds nothing that does. What lies around attention (a T5 layer of norm and
    attention, a `ModuleList`) is opened. A child that the block uses through another method than its forward is yielded
    like any other, and its region is then never entered.
    """
    for child_name, child in block.named_children():
        full_name = f"{name}.{child_name}"
        holder = type(child).forward is nn.Module.forward  # ModuleList, ModuleDict
        if holder or takes_cache(child):
            yield from submodules_beside_attention(full_name, child) if holder or _holds_attention(child) else ()
        elif type(child).forward not in _KEEP_THEIR_INPUT_ALONE and any(True for _ in child.parameters()):
            yield full_name, child


def _holds_attention(module: nn.Module) -> bool:
    return any(takes_cache(child) for child in module.children())
