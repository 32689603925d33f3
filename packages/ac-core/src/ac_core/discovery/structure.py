"""What the module tree says about the units of a model, where the modules say nothing about themselves.

One pass collects a few facts about every module; all questions are answered from those, so that the work grows with
the number of modules and not with its square.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.parameter import Parameter, is_lazy
from torch.nn.utils.parametrize import ParametrizationList

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_PLUMBING = ("torch.distributed.", "torch.nn.parallel.", "torch.nn.utils.", "torch._dynamo.")


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one module and everything below it.

    matrices: how many weight matrices and filters there are.
    composite: the module has a forward of its own, over at least two matrices.
    light: it has a forward of its own, over at least a matrix and a normalisation.
    norm, embedding: whether there is a normalisation, an embedding.
    units: of a container, its composite children, where they are at least half of it and most are of one kind.
    in_units: how many of the matrices lie in lists of two or more units that each hold a normalisation.
    holds_units: whether there is a container with a composite child in it, or with light units.
    """

    matrices: int = 0
    composite: bool = False
    light: bool = False
    norm: bool = False
    embedding: bool = False
    units: tuple[nn.Module, ...] = ()
    in_units: int = 0
    holds_units: bool = False

    @property
    def is_stage(self) -> bool:
        """Made of repeated blocks, as a stage of Swin or ConvNeXt is, and so no block itself.

        The experts of an MoE block repeat as well. They differ from the blocks of a stage in that they hold no norm.
        """
        return 2 * self.in_units > self.matrices


class Structure:
    """The facts about every module of a model, and the lists of units that follow from them."""

    def __init__(self, model: nn.Module) -> None:
        self._facts: dict[int, Facts] = {}
        self._collect(model)

    def facts(self, module: nn.Module) -> Facts:
        return self._facts[id(module)]

    def repeated(self, container: nn.Module) -> tuple[nn.Module, ...]:
        """The blocks of a container: its units, unless there is one alone or most are stages to go down through."""
        units = self.facts(container).units
        stages = sum(self.facts(unit).is_stage for unit in units)
        return units if len(units) >= 2 and 2 * stages <= len(units) else ()

    def light_units(self, container: nn.Module) -> tuple[nn.Module, ...]:
        """Children of one kind in a container, of which some are light units, such as convolution and norm."""
        if not isinstance(container, CONTAINERS):
            return ()
        children = _children(container)
        kinds = Counter(kind(child) for child in children if self.facts(child).matrices)
        common, count = max(kinds.items(), key=lambda item: item[1], default=(nn.Module, 0))
        units = tuple(child for child in children if kind(child) is common)
        own = count >= 2 and not is_torchs(common)
        return units if own and any(self.facts(unit).light for unit in units) else ()

    def numbered(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """Composite children of one class that a number alone tells apart, as in `self.block1` and `self.block2`."""
        alike: dict[tuple[str, type], list[nn.Module]] = {}
        for name, child in module.named_children():
            stem = name.rstrip("0123456789")
            if stem != name and self.facts(child).composite and not is_torchs(kind(child)):
                alike.setdefault((stem, kind(child)), []).append(child)
        return tuple(unit for units in alike.values() if len(units) >= 2 for unit in units)

    def _collect(self, module: nn.Module) -> Facts:
        if (known := self._facts.get(id(module))) is not None:
            return known
        below = [self._collect(child) for child in module.children()]
        base = _adapted(module)  # an adapter is no unit: it stands for the layer that it adapts
        facts = self._combine(module, below) if base is None else self._facts[id(base)]
        self._facts[id(module)] = facts
        return facts

    def _combine(self, module: nn.Module, below: list[Facts]) -> Facts:
        own = [p for p in module._parameters.values() if p is not None]
        owned = sum(map(_is_matrix, own))
        if isinstance(module, ParametrizationList):
            owned = min(owned, 1)  # the factors of one weight
        matrices = owned + sum(f.matrices for f in below)
        norm = _is_norm(own, matrices) or any(f.norm for f in below)
        runs = _has_forward(module)
        units = self._units(module) if isinstance(module, CONTAINERS) else ()
        listed = isinstance(module, CONTAINERS) and any(self.facts(child).composite for child in _children(module))
        blocks = len(units) >= 2 and all(self.facts(unit).norm for unit in units)
        in_units = sum(self.facts(unit).matrices for unit in units) if blocks else sum(f.in_units for f in below)
        return Facts(
            matrices=matrices,
            composite=runs and matrices >= 2,
            light=runs and matrices >= 1 and norm,
            norm=norm,
            embedding=isinstance(module, nn.Embedding) or any(f.embedding for f in below),
            units=units,
            in_units=in_units,
            holds_units=bool(listed or self.light_units(module)) or any(f.holds_units for f in below),
        )

    def _units(self, container: nn.Module) -> tuple[nn.Module, ...]:
        children = _children(container)
        units = tuple(child for child in children if self.facts(child).composite)
        kinds = {kind(unit) for unit in units}
        mixed = len(kinds) > max(1, len(units) // 2)
        return () if mixed or 2 * len(units) < len(children) else units


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers of torch's own: `torch.compile`, DDP, FSDP, `checkpoint_wrapper`."""
    while kind(module) is nn.Module and type(module) is not nn.Module:
        children = list(module.children())
        if len(children) != 1:
            break
        module = children[0]
    return module


def kind(module: nn.Module) -> type:
    """The class that the module was written as. `fully_shard` and `parametrize` put classes of their own before it."""
    return next(cls for cls in type(module).__mro__ if not f"{cls.__module__}.".startswith(_PLUMBING))


def is_torchs(cls: type) -> bool:
    """A class that comes with torch says nothing about the model that uses it."""
    return cls.__module__.startswith("torch.")


def arguments(module: nn.Module) -> tuple[str, ...]:
    """The names that the forward of the module's class gives to its arguments."""
    return _arguments(type(module).forward)


@lru_cache(maxsize=4096)
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):  # compiled code, which says nothing about itself
        return ()


def _children(container: nn.Module) -> list[nn.Module]:
    """With repetitions, other than `children()`: one block that is run four times is a repeated block."""
    return [unwrapped(child) for child in container._modules.values() if child is not None]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_matrix(p: Parameter) -> bool:
    # What is shaped to broadcast is none: the gain of a weight norm, tokens and positions that are added to a batch.
    return is_lazy(p) or p.dim() == 2 or (sum(size > 1 for size in p.shape) >= 2 and p.shape[0] > 1)


def _is_norm(own: list[Parameter], matrices: int) -> bool:
    return bool(own) and not matrices and not any(is_lazy(p) or p.dim() > 1 for p in own)


def _adapted(module: nn.Module) -> nn.Module | None:
    """The layer that a PEFT adapter is put around. A model that holds adapters has loaded their module."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return module.get_base_layer() if tuners is not None and isinstance(module, tuners.BaseTunerLayer) else None
