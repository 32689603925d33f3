"""Finding the blocks of a model: the units that activation checkpointing works on.

Three rules, the first that says something about a module wins:

1. the caller's own choice (a class, a predicate or a glob over module names);
2. Hugging Face's `GradientCheckpointingLayer`, the outermost of nested ones;
3. structure, for whatever rule 2 leaves untouched: the children of a repeated container of composite modules.

There is no table of model classes and no list of attribute names: those are what makes checkpointing silently miss a
model that is new, renamed or customised.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

from ac_core.discovery.parts import part_of

BlockChoice = type[nn.Module] | str | Callable[[str, nn.Module], bool]
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Block:
    """A block of a model.

    name: its module path, as in `named_modules()`.
    module: the module itself.
    part: the part of the model it belongs to: `language`, `vision`, `audio`, or another tower's own name.
    trainable: whether any of its parameters needs a gradient.
    why: the rule that found it.
    """

    name: str
    module: nn.Module
    part: str
    trainable: bool
    why: str


def find_blocks(model: nn.Module, blocks: BlockChoice | Iterable[BlockChoice] | None = None) -> list[Block]:
    """The blocks of `model` in the order of `named_modules()`; no block lies inside another.

    Args:
        model: any module. Nothing is run and nothing is changed.
        blocks: the caller's own choice in place of the rules: a module class, a predicate `(name, module) -> bool`,
            a glob over module names (`"encoder.layers.*"`), or several of these.

    Returns:
        The blocks; an empty list where no rule finds one.

    Raises:
        TypeError: `model` is no module, or `blocks` is none of these.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module")
    if blocks is not None:
        choices = _choices(blocks)
        found = {name: (module, "chosen by blocks=") for name, module in _outermost(model, _any_of(choices))}
    else:
        declared = dict(_outermost(model, _is_checkpointing_layer))
        found = {name: (module, "GradientCheckpointingLayer") for name, module in declared.items()}
        for name, module in _repeated(model, ""):
            taken = module in declared.values()
            if not taken and not any(_nested(name, other) or _nested(other, name) for other in declared):
                found[name] = (module, "repeated structure")
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return [
        Block(name, module, part_of(model, name), any(p.requires_grad for p in module.parameters()), why)
        for name, (module, why) in sorted(found.items(), key=lambda item: order[item[0]])
    ]


def candidate_containers(model: nn.Module) -> list[str]:
    """Names of the containers a caller might mean when no rule finds a block, for the error that says so."""
    return [
        f"{name}.* ({len(module)} x {type(next(iter(module.children()))).__name__})"
        for name, module in model.named_modules()
        if name and isinstance(module, CONTAINERS) and len(module)
    ]


def _choices(blocks: BlockChoice | Iterable[BlockChoice]) -> list[BlockChoice]:
    several = [blocks] if isinstance(blocks, str) or callable(blocks) else blocks
    choices = list(several) if isinstance(several, Iterable) else [several]
    for choice in choices:
        if isinstance(choice, nn.Module) or not (isinstance(choice, str) or callable(choice)):
            raise TypeError(
                f"blocks: {type(choice).__name__} is not a module class, a glob over module names, or a predicate "
                "(name, module)"
            )
    return choices


def _any_of(choices: list[BlockChoice]) -> Callable[[str, nn.Module], bool]:
    def chosen(name: str, module: nn.Module) -> bool:
        for choice in choices:
            if isinstance(choice, type):
                hit = isinstance(module, choice)
            elif isinstance(choice, str):
                hit = fnmatchcase(name, choice)
            else:
                hit = choice(name, module)
            if hit:
                return True
        return False

    return chosen


def _is_checkpointing_layer(_name: str, module: nn.Module) -> bool:
    # A model made of these layers has loaded their module, so ac-core need not depend on transformers.
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def _outermost(model: nn.Module, wanted: Callable[[str, nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()  # a module under two names is one block, under the first

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if name and wanted(name, module):  # the model itself is not a block of itself
            yield name, module
            return
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child)

    yield from visit("", model)


def _nested(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


def _repeated(module: nn.Module, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Children of the outermost repeated containers, going down through stages (Swin, ConvNeXt)."""
    seen = set() if seen is None else seen
    units = _units(module) if isinstance(module, CONTAINERS) else []
    if len(units) >= 2 and not all(_is_stage(unit) for _, unit in units):
        for unit_name, unit in units:
            if id(unit) not in seen:
                seen.add(id(unit))
                yield f"{name}.{unit_name}" if name else unit_name, unit
        return
    for child_name, child in module.named_children():
        yield from _repeated(child, f"{name}.{child_name}" if name else child_name, seen)


def _units(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """The composite children of a container, where they are at least half of it and most share one class."""
    children = list(container.named_children())
    units = [(name, child) for name, child in children if _is_composite(child)]
    kinds = {type(child) for _, child in units}
    mixed = len(kinds) > max(1, len(units) // 2)
    return [] if mixed or 2 * len(units) < len(children) else units


def _is_composite(module: nn.Module) -> bool:
    """Has a forward of its own over at least two weight matrices or filters."""
    if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return sum(is_lazy(p) or p.dim() >= 2 for p in module.parameters()) >= 2


def _is_stage(module: nn.Module) -> bool:
    """Holds repeated blocks of its own.

    The experts of an MoE block repeat as well. They differ from the blocks of a stage in that they hold no norm.
    """
    for child in module.modules():
        if isinstance(child, CONTAINERS):
            units = _units(child)
            if len(units) >= 2 and all(any(_is_norm(m) for m in unit.modules()) for _, unit in units):
                return True
    return False


def _is_norm(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(map(is_lazy, own)) and all(p.dim() <= 1 for p in own) and not list(module.children())
