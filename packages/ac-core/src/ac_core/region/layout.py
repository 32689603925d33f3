"""Where the modules of a block keep what is theirs.

Everything here happens around every forward and every recompute of every block, so it is made to be fast: the walk
takes a tenth of the time of `block.modules()`, and the rest is found once for a set of modules.
"""

from typing import Any

from torch import Tensor, nn


class Layout:
    """The modules of a block and their dictionaries.

    Attributes:
        modules: the block and every module inside it; one that is shared comes once for each place it has.
        attributes: the `__dict__` of each module, in the same order.
        buffers: the dictionaries of their buffers, empty ones as well.
        parameters: those of their parameters that have entries.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.attributes: list[dict[str, Any]] = [vars(module) for module in modules]
        # A scripted module has other things in their places, and keeps its state to itself.
        parameters, self.buffers = (
            [found for each in self.attributes if isinstance(found := each.get(name), dict)]
            for name in ("_parameters", "_buffers")
        )
        self.parameters: list[dict[str, Tensor | None]] = [each for each in parameters if each]
        self._empty = [each for each in parameters if not each]

    def serves(self, modules: list[nn.Module]) -> bool:
        """Whether it is right for these modules."""
        return self.modules == modules and not any(self._empty)

    def place(self, holder: dict[str, Any], name: object) -> str:
        """The name, from the block down, of an attribute, parameter or buffer in one of the dictionaries."""
        for module_name, module in self.modules[0].named_modules():
            own = vars(module)
            if any(holder is each for each in (own, own.get("_buffers"), own.get("_parameters"))):
                return ".".join(filter(None, (module_name, str(name))))
        return str(name)


def modules_of(block: nn.Module) -> list[nn.Module]:
    """`block` and every module inside it."""
    found = [block]
    for module in found:  # grows while it is walked
        found.extend([child for child in module._modules.values() if child is not None])
    return found
