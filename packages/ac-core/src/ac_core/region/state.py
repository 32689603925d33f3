"""State that a recompute must see as its forward did, for one block: the list of all that is kept."""

from torch import nn

from ac_core.region.ambient import Ambient
from ac_core.region.attributes import KeptAttributes
from ac_core.region.contexts import ContextFn
from ac_core.region.parameters import SameParameters
from ac_core.region.randomness import ReplayedRandomness


def state_contexts(block: nn.Module, name: str) -> list[ContextFn]:
    """The context functions that a checkpointed block needs, outermost first.

    What torch's checkpoint restores by itself is not repeated: the default random number generators of the CPU and of
    the devices of the region's inputs, autocast of the CPU and of one device type, `with torch.device(...)`, grad mode.

    They belong outside all other contexts, so that no mode sees what they do, and to eager mode alone: compiled code
    has no recompute of its own to restore anything for.
    """
    return [Ambient(), SameParameters(block, name), KeptAttributes(block, name), ReplayedRandomness(block)]
