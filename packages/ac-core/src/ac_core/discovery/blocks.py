"""Finding the blocks of a model: the units that activation checkpointing works on.

The caller's own choice (a class, a predicate or a glob over module names) replaces all rules. Else, in this order, each
for the modules that no earlier rule took or found a block in:

1. Hugging Face's `GradientCheckpointingLayer`, the outermost of nested ones, save that stages are gone through;
2. structure: the children of a repeated container of composite modules;
3. modules of the same class as a block;
4. in the towers beside a language model and between them: whatever else is composite, a stem, a merger, a projector;
5. where all that finds nothing: numbered attributes of one class.

There is no table of model classes and no list of attribute names: those are what makes checkpointing silently miss a
model that is new, renamed or customised.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property

from torch import nn

from ac_core.discovery.parts import LANGUAGE, part_of
from ac_core.discovery.structure import CONTAINERS, Structure, arguments, is_torchs, kind

BlockChoice = type[nn.Module] | str | Callable[[str, nn.Module], bool]


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
    module: nn.Module = field(repr=False)
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
    search = _Search(model)
    if blocks is not None:
        search.take_outermost(_any_of(_choices(blocks)), "chosen by blocks=")
    else:
        search.take_outermost(search.is_declared, "GradientCheckpointingLayer")
        search.take_repeated()
        search.take_same_class()
        search.take_units_of_towers()
        if not search.found:
            search.take_numbered()
    return [
        Block(name, module, part_of(model, name), any(p.requires_grad for p in module.parameters()), search.found[name])
        for name, module in model.named_modules()
        if name in search.found
    ]


def misses(model: nn.Module, blocks: BlockChoice | Iterable[BlockChoice]) -> list[str]:
    """What is wrong with a caller's choice: entries that match no module, and those that match a list, which is never
    called itself."""
    problems = []
    named = list(model.named_modules())[1:]
    for choice in _choices(blocks):
        chosen = _any_of([choice])
        hits = [(name, module) for name, module in named if chosen(name, module)]
        lists = [name for name, module in hits if isinstance(module, nn.ModuleList | nn.ModuleDict)]
        if not hits:
            close = get_close_matches(str(choice), [name for name, _ in named], n=2)
            problems.append(f"{choice!r} matches no module" + f"; near: {', '.join(map(repr, close))}" * bool(close))
        elif lists and len(lists) == len(hits):
            problems.append(f"{choice!r} matches a list of modules, which is never called itself; use '{lists[0]}.*'")
    return problems


def candidate_containers(model: nn.Module) -> list[str]:
    """What a caller might mean when no rule finds a block, for the error that says so: containers by a glob that takes
    their children, then classes of the model's own that occur more than once."""
    by_name = list(model.named_modules())
    containers = [
        f"{name}.* ({len(module)} x {type(next(iter(module.children()))).__name__})".removeprefix(".")
        for name, module in [*by_name[1:], by_name[0]]  # the model itself last
        if isinstance(module, CONTAINERS) and len(module)
    ]
    counts = Counter(cls for module in model.modules() if not is_torchs(cls := kind(module)))
    classes = [f"{cls.__name__} ({count} modules of this class)" for cls, count in counts.items() if count > 1]
    return containers + classes


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


def _is_checkpointing_layer(module: nn.Module) -> bool:
    # A model made of these layers has loaded their module, so ac-core need not depend on transformers.
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def _takes_cache(module: nn.Module) -> bool:
    return any(re.search(r"^(?!use_).*(cache|past)", argument) for argument in arguments(module))


class _Search:
    """The blocks found so far, and the rules that add to them, each only where the earlier ones found nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[str, str] = {}  # name -> why
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules()}
        self._holders: set[str] = set()  # names of the modules that hold a found block

    def take_outermost(self, wanted: Callable[[str, nn.Module], bool], why: str) -> None:
        for name, module in self._outside():
            if name and wanted(name, module):  # the model itself is not a block of itself
                self._take(module, why)

    def is_declared(self, _name: str, module: nn.Module) -> bool:
        """Declared to be a block, and not as a stage of such blocks (Swin): too much would be live in its recompute."""
        if not _is_checkpointing_layer(module):
            return False
        inside = any(_is_checkpointing_layer(m) for m in module.modules() if m is not module)
        return not (inside and self._structure.facts(module).is_stage)

    def take_repeated(self) -> None:
        """The units of the outermost repeated containers, going down through stages (Swin, ConvNeXt, U-Net)."""
        cached: set[int] = set()
        for _, module in self._outside():
            cached |= self._lists_with_cache(module)
            units = () if id(module) in cached else self._structure.repeated(module)
            if not any(self._name(unit) in self._holders for unit in units):
                for unit in units:
                    self._take(unit, "repeated structure")

    def _lists_with_cache(self, module: nn.Module) -> set[int]:
        """The attentions (by id of their list) of a model that keeps attentions and MLPs in lists of equal length.

        There the model itself hands every attention a key/value cache, to which a recompute would append a second time
        (XLM makes one whatever its settings say); in layers that are one module each, it hands on what it was given.
        """
        lists = [child for child in module.children() if len(self._structure.repeated(child)) >= 2]
        takes = {id(each): _takes_cache(self._structure.repeated(each)[0]) for each in lists}
        return {
            id(each)
            for each in lists
            if takes[id(each)] and any(len(each) == len(other) and not takes[id(other)] for other in lists)
        }

    def take_same_class(self) -> None:
        """The last stage of a tower may hold a single block, and a merger stand beside a list of its like."""
        kinds = {kind(self._model.get_submodule(name)) for name in self.found}
        for name, module in self._outside():
            if kind(module) in kinds.difference(CONTAINERS) and name and name not in self._holders:
                self._take(module, "same class as other blocks")

    def take_units_of_towers(self) -> None:
        """What else is composite in the towers and between them, where a language model has any: stems, projectors.

        In the language model itself that would be embeddings and heads, and where it is alone there is no tower.
        """
        if not any(part_of(self._model, name) == LANGUAGE for name in self.found):
            return
        for name, module in self._outside():
            facts = self._structure.facts(module)
            units = self._structure.light_units(module)
            if not units and facts.composite and not (facts.embedding or facts.holds_units or name in self._holders):
                units = (module,)
            if name and units and part_of(self._model, name) != LANGUAGE:
                for unit in units:
                    if self._name(unit) not in self._holders:
                        self._take(unit, "unit of a tower")

    def take_numbered(self) -> None:
        """Children of one class that are told apart by a number (`down1`, `down2`), where there are no lists at all."""
        for _, module in self._outside():
            for unit in self._structure.numbered(module):
                inside = self._structure.numbered(unit)
                made_of_them = sum(self._structure.facts(m).matrices for m in inside)
                if made_of_them < self._structure.facts(unit).matrices:  # else a stage and nothing more
                    self._take(unit, "numbered attributes of one class")

    @cached_property
    def _structure(self) -> Structure:
        return Structure(self._model)

    def _name(self, module: nn.Module) -> str:
        return self._names[id(module)]

    def _take(self, module: nn.Module, why: str) -> None:
        name = self._name(module)
        words = name.split(".")
        around = [".".join(words[:end]) for end in range(len(words))]
        if name not in self.found and not any(outer in self.found for outer in around):  # a module has several names
            self.found[name] = why
            self._holders.update(around)

    def _outside(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module that is not in a found block, before the modules inside it; blocks may be taken on the way."""

        def visit(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
            name = self._name(module)
            if id(module) in seen or name in self.found:
                return
            seen.add(id(module))
            yield name, module
            if name not in self.found:
                for child in module.children():
                    yield from visit(child)

        seen: set[int] = set()
        return visit(self._model)
