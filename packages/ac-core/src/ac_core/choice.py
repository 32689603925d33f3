"""Which blocks are checkpointed, whole or in pieces, and what the report says of each: before anything is changed."""

import warnings
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby

from torch import nn

from ac_core.config import ActivationCheckpointingConfig, Scope
from ac_core.discovery.blocks import Block, candidate_containers
from ac_core.discovery.parts import LANGUAGE
from ac_core.errors import ActivationCheckpointingError
from ac_core.layers import select_layers
from ac_core.region.cache import takes_cache, why_cache_is_needed
from ac_core.region.foreign import Marks, mark_about, marks
from ac_core.region.submodules import submodules_beside_attention
from ac_core.report import BlockGroup
from ac_core.selective.rule import SaveRule
from ac_core.trainability import FROZEN, frozen_blocks

_NOT_ASKED = ("out of scope", "not among the layers")
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

OFFLOAD = "offload"
Option = str | tuple[str, ...]
"""What is done with a block: `"none"`, `"full"`, `"selective"`, or the names of what is kept. `"offload"`, alone or
among such names: what it keeps of its inputs is kept in host memory."""


@dataclass(frozen=True)
class Region:
    """A module to checkpoint: a block, or a piece of one. dormant: until something in it needs a gradient. rule: which
    outputs are kept besides the input; `None`: none. offload: the input is kept in host memory."""

    name: str
    module: nn.Module
    block: Block
    dormant: bool = False
    rule: SaveRule | None = None
    offload: bool = False


@dataclass(frozen=True)
class Choice:
    """What `apply` will do. regions: in model order. rows: of the report, one a block. why_cache: why the key/value
    cache stays on; empty: it is turned off."""

    regions: list[Region]
    rows: list[BlockGroup]
    why_cache: str = ""


def choose(
    model: nn.Module, found: list[Block], config: ActivationCheckpointingConfig, *, chosen_by_caller: bool
) -> Choice:
    """The regions to checkpoint among the blocks found.

    Raises:
        ActivationCheckpointingError: the model cannot be checkpointed as asked. Warns with `strict=False`.
    """
    foreign = marks(model)
    if config.policy == "none":
        return Choice([], _left_alone(found, foreign, config))
    if not found:
        _refuse(config, _no_blocks(model, chosen_by_caller=chosen_by_caller))
    if found and not any(_in_scope(block.part, config.scope) for block in found):
        parts = sorted({block.part for block in found})
        _refuse(config, f"scope: {config.scope!r} holds no block of this model; its parts are {parts}")
    why_cache = "keep_cache=True" if config.keep_cache else why_cache_is_needed(model, (b.module for b in found))
    frozen = frozen_blocks(model, found)
    selected = selected_blocks(found, config)
    options = _options(found, selected, config)
    regions: dict[int, Region] = {}  # by identity: a module that blocks share becomes one region
    rows = []
    for block in found:
        other = mark_about(block.name, block.module, foreign)
        pieces: list[Region] = []
        if not _in_scope(block.part, config.scope):
            reason = "out of scope"
        elif block.name not in selected:
            reason = "not among the layers"
        elif other is not None:
            reason = f"already checkpointed by {other[1]}"
            _refuse(config, f"'{other[0]}' is {reason}; turn that off, so that nothing is recomputed twice")
        else:
            option = options[block.name]
            pieces = [] if option == "none" else _pieces(block, why_cache, option, config, block.name in frozen)
            reason = _about(block, pieces) if option != "none" else ""
            if not pieces and option != "none":
                _refuse(config, f"block '{block.name}': {reason} ({why_cache}); choose the other blocks with blocks=")
        for piece in pieces:
            regions.setdefault(id(piece.module), piece)
        asked = "none" if reason in _NOT_ASKED else option_text(options[block.name])
        rows.append(BlockGroup((block.name,), block.part, block.why, asked, _applied(block, pieces, asked), reason))
    return Choice(list(regions.values()), rows, why_cache)


def _applied(block: Block, pieces: list[Region], asked: str) -> str:
    if not pieces or pieces[0].dormant:
        return "none"
    return asked if pieces[0].module is block.module else "sub-modules"


def _about(block: Block, pieces: list[Region]) -> str:
    """Why what is applied is not just what was asked for; empty if it is."""
    if not pieces:
        return "the cache stays on, and it takes the cache and holds nothing beside attention to checkpoint"
    if pieces[0].dormant:
        return FROZEN
    if pieces[0].module is block.module:
        return ""
    names = ", ".join(piece.name.removeprefix(f"{block.name}.") for piece in pieces)
    return f"the cache stays on, so attention is run once and keeps what it saves; one by one: {names}"


def _pieces(
    block: Block, why_cache: str, option: Option, config: ActivationCheckpointingConfig, dormant: bool
) -> list[Region]:
    """The block itself or, where a cache stays on and it takes one, what can be run again inside it."""
    rule = SaveRule.of(config.save) if option == "selective" else None
    if isinstance(option, tuple):
        rule = SaveRule.of(without_offload(option))
    offload = is_offloaded(option) if config.plan is not None else config.offload == "cpu"
    whole = [(block.name, block.module)]
    inside = submodules_beside_attention(block.name, block.module)
    pieces = inside if why_cache and takes_cache(block.module) else whole
    return [Region(name, module, block, dormant, rule, offload) for name, module in pieces]


def is_offloaded(option: Option) -> bool:
    """Whether what a block keeps of its inputs is kept in host memory."""
    return option == OFFLOAD or (isinstance(option, tuple) and OFFLOAD in option)


def with_offload(option: Option) -> Option:
    """The same for a block that is checkpointed, its inputs in host memory."""
    return (OFFLOAD, *option) if isinstance(option, tuple) else OFFLOAD


def without_offload(option: Option) -> Option:
    """The same with its inputs where they are."""
    if isinstance(option, tuple):
        return tuple(name for name in option if name != OFFLOAD)
    return "full" if option == OFFLOAD else option


def _options(found: list[Block], selected: set[str], config: ActivationCheckpointingConfig) -> dict[str, Option]:
    """What is to be done with each selected block."""
    if config.plan is None:
        return dict.fromkeys(selected, str(config.policy))
    planned = {without_wrappers(name): option for name, option in config.plan.items()}
    own = {without_wrappers(block.name): block.name for block in found if block.name in selected}
    if unknown := [name for name in planned if name not in own]:
        close = get_close_matches(unknown[0], own, n=3)
        hint = f"; near: {', '.join(map(repr, close))}" if close else ""
        raise ActivationCheckpointingError(f"plan: {unknown[0]!r} is no block of this model in scope and layers{hint}")
    if missing := [name for short, name in own.items() if short not in planned]:
        more = f", and nothing for {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ActivationCheckpointingError(
            f"plan: it has nothing for block '{missing[0]}'{more}; it was made for another model, scope or layers"
        )
    return {name: planned[short] for short, name in own.items()}


def without_wrappers(name: str) -> str:
    """A block's name without what DDP, FSDP1 and torch.compile put into it when they wrap a module."""
    return ".".join(token for token in name.split(".") if token not in _WRAPPERS)


def option_text(option: Option) -> str:
    """What is done with a block, in a word or a few: `keep attention, self_attn.{q_proj,k_proj}, mlp.up_proj`."""
    if is_offloaded(option):
        return f"{option_text(without_offload(option))}; inputs on the host"
    if isinstance(option, str):
        return option
    texts = []
    for parent, names in groupby(option, key=lambda name: name.rpartition(".")[0]):
        several = list(names)
        ends = ",".join(name.rpartition(".")[2] for name in several)
        texts += [f"{parent}.{{{ends}}}"] if parent and len(several) > 1 else several
    return f"keep {', '.join(texts)}"


def _left_alone(found: list[Block], foreign: Marks, config: ActivationCheckpointingConfig) -> list[BlockGroup]:
    """The rows for a model that is to have no checkpointing."""
    if foreign:
        name, (_, tool) = next(iter(foreign.items()))
        _refuse(config, f"asked for no checkpointing, but '{name}' is checkpointed by {tool}; turn that off")
    applied, reason = ("other", "another tool's") if foreign else ("none", "")
    return [BlockGroup((block.name,), block.part, block.why, "none", applied, reason) for block in found]


def selected_blocks(found: list[Block], config: ActivationCheckpointingConfig) -> set[str]:
    """Names of the blocks in the scope that `layers` selects; a part that it does not speak of is selected whole.

    Raises:
        ActivationCheckpointingError: `layers` speaks of what is not there.
    """
    by_part: dict[str, list[str]] = {}
    for block in found:
        if _in_scope(block.part, config.scope):
            by_part.setdefault(block.part, []).append(block.name)
    layers = config.layers
    selected = set()
    for part, names in by_part.items():
        text = layers.get(part) if isinstance(layers, dict) else layers
        try:
            selected.update(names if text is None else [names[i] for i in select_layers(text, names)])
        except ValueError as error:
            raise ActivationCheckpointingError(f"layers: {error}; part {part!r}") from None
    if isinstance(layers, dict) and (unknown := [part for part in layers if part not in by_part]):
        raise ActivationCheckpointingError(
            f"layers: {unknown[0]!r} is no part of this model in the scope; its parts are {sorted(by_part)}"
        )
    return selected


def _refuse(config: ActivationCheckpointingConfig, message: str) -> None:
    if config.strict:
        raise ActivationCheckpointingError(message)
    warnings.warn(message, stacklevel=4)


def _in_scope(part: str, scope: Scope) -> bool:
    wanted = (scope,) if isinstance(scope, str) else scope
    return "all" in wanted or part in wanted or ("multimodal" in wanted and part != LANGUAGE)


def _no_blocks(model: nn.Module, *, chosen_by_caller: bool) -> str:
    containers = candidate_containers(model)
    hint = f"; candidates: {', '.join(containers[:8])}" if containers else ""
    if chosen_by_caller:
        return f"blocks= matches no module of this {type(model).__name__}{hint}"
    return (
        f"no block recognised in this {type(model).__name__}, so nothing would be checkpointed; say what its blocks "
        f"are with blocks=, a module class or a glob over names such as 'layers.*'{hint}"
    )
