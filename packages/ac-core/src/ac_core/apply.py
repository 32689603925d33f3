"""The two verbs: apply a policy to a model, and take it off again."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ac_core.config import ActivationCheckpointingConfig, PolicyName, Scope
from ac_core.discovery.blocks import Block, BlockChoice, candidate_containers, find_blocks
from ac_core.discovery.parts import LANGUAGE
from ac_core.errors import ActivationCheckpointingError
from ac_core.region.buffers import KeptBuffers
from ac_core.region.cache import takes_cache, turn_cache_off, turn_cache_on, why_cache_is_needed
from ac_core.region.contexts import ComposedContextFn, ContextFn
from ac_core.region.forward import CheckpointedForward, checkpointed_forwards
from ac_core.region.submodules import submodules_beside_attention
from ac_core.report import BlockGroup, Report, group_blocks
from ac_core.trainability import FROZEN, frozen_parts

_RECORD = "_ac_core_applied"


@dataclass
class _Applied:
    """Left on the model that `apply` was called with, so that `remove` can undo it, from a copy or an unpickled model
    as well."""

    configs_with_cache: list[tuple[Any, Any]]


def apply_activation_checkpointing(
    model: nn.Module,
    config: ActivationCheckpointingConfig | bool | PolicyName | None = True,
    *,
    scope: Scope | list[str] | None = None,
    blocks: BlockChoice | Iterable[BlockChoice] | None = None,
    context_fn: ContextFn | Iterable[ContextFn] | None = None,
) -> Report:
    """Checkpoint the blocks of `model`, in place, and say what was done.

    The forward of each chosen block is replaced on the instance; the module tree, parameter names, `state_dict` keys
    and classes stay as they are. The key/value cache is turned off on every config in the model; where it has to stay
    on, blocks are checkpointed child by child around their attention, and the report says why. Blocks of a part that is
    frozen are left out until something in them needs a gradient. May be called before or after `fully_shard`, and
    before `DistributedDataParallel` or with the wrapped model. A mistake is raised before anything is changed.

    Args:
        model: any module.
        config: a policy (`True`, `"full"`, `False`, `"none"`) or an `ActivationCheckpointingConfig`.
        scope: shorthand for the field of that name, where `config` is a policy.
        blocks: what to take for blocks instead of what the rules find; see `find_blocks`.
        context_fn: `() -> (forward_context, recompute_context)`, as `torch.utils.checkpoint` takes it, or several: each
            is entered around every forward and recompute of a block, the first outermost. Contexts must be
            re-enterable.

    Returns:
        The report: asked and applied for every block of the model.

    Raises:
        ValueError: a setting has no such value.
        ActivationCheckpointingError: no block is recognised, the scope holds none, checkpointing is already on (ours or
            another tool's). With `strict=False` these warn.
    """
    if not isinstance(config, ActivationCheckpointingConfig):
        config = ActivationCheckpointingConfig(policy=config, scope=scope if scope is not None else "all")
    elif scope is not None:
        raise ValueError(f"scope: {scope!r} is given beside a config; put it in the config")
    found = find_blocks(model, blocks)
    if checkpointed_forwards(model):
        raise ActivationCheckpointingError(
            "ac-core already checkpoints this model; call remove_activation_checkpointing(model) first"
        )
    why_cache = "keep_cache=True" if config.keep_cache else why_cache_is_needed(model, (b.module for b in found))
    frozen = frozen_parts(model, {block.part for block in found})
    taken, rows = _choose(model, found, config, why_cache, frozen, chosen_by_caller=blocks is not None)
    # By identity: a module that blocks share becomes one region.
    pieces = {id(p.module): (p, block) for block in reversed(taken) for p in _pieces(block, why_cache)}
    regions = [(piece, block, _compose(piece, context_fn)) for piece, block in pieces.values()]
    cached = turn_cache_off(model) if regions and not why_cache else []
    for piece, block, context in regions:
        piece.module.forward = CheckpointedForward(  # type: ignore[assignment]
            piece.module,
            piece.name,
            block=block.module,
            preserve_rng_state=config.preserve_rng_state,
            early_stop=config.early_stop,
            context_fn=context,
            dormant=block.part in frozen,
        )
    notes = []
    if regions:
        setattr(model, _RECORD, _Applied(cached))
    if cached:
        plural = "s" if len(cached) > 1 else ""
        notes.append(f"key/value cache turned off for training (use_cache=False on {len(cached)} config{plural})")
    elif regions and why_cache:
        notes.append(f"key/value cache left on: {why_cache}")
    scopes = (config.scope,) if isinstance(config.scope, str) else config.scope
    return Report(str(config.policy), scopes, group_blocks(rows), tuple(notes))


def remove_activation_checkpointing(model: nn.Module) -> None:
    """Undo `apply_activation_checkpointing` on a model, or on a copy or wrapper of it; harmless where nothing is on."""
    for module, forward in checkpointed_forwards(model):
        if forward.replaced is None:
            del module.forward
        else:
            module.forward = forward.replaced
    for module in model.modules():
        applied = module.__dict__.pop(_RECORD, None)
        if applied is not None:
            turn_cache_on(applied.configs_with_cache)


def _compose(block: Block, context_fn: ContextFn | Iterable[ContextFn] | None) -> ContextFn | None:
    """What is entered around each run of a block: the caller's, inside what keeps the block's buffers right."""
    several = [context_fn] if callable(context_fn) else list(context_fn or ())
    for function in several:
        if not callable(function):
            raise TypeError(f"context_fn: {function!r} is not callable")
    if any(True for _ in block.module.buffers()) or any(None in m._buffers.values() for m in block.module.modules()):
        several.insert(0, KeptBuffers(block.module, block.name))
    return ComposedContextFn(several) if len(several) > 1 else next(iter(several), None)


def _choose(
    model: nn.Module,
    found: list[Block],
    config: ActivationCheckpointingConfig,
    why_cache: str,
    frozen: set[str],
    *,
    chosen_by_caller: bool,
) -> tuple[list[Block], list[BlockGroup]]:
    """The blocks to checkpoint, and a line of the report for every block. Raises, or warns, before any change."""
    asked = str(config.policy)
    foreign = dict(_checkpointed_by_others(model))
    if asked == "none":
        if foreign:
            name, tool = next(iter(foreign.items()))
            _refuse(config, f"asked for no checkpointing, but '{name}' is checkpointed by {tool}; turn that off")
        return [], [
            BlockGroup(
                (b.name,), b.part, b.why, asked, "other" if foreign else "none", "another tool's" * bool(foreign)
            )
            for b in found
        ]
    if not found:
        _refuse(config, _no_blocks(model, chosen_by_caller=chosen_by_caller))
    parts = {block.part for block in found}
    taken, rows = [], []
    for block in found:
        applied, reason = "none", ""
        inside = next((n for n in foreign if n == block.name or n.startswith(f"{block.name}.")), None)
        if not _in_scope(block.part, config.scope):
            reason = "out of scope"
        elif inside is not None:
            reason = f"already checkpointed by {foreign[inside]}"
            _refuse(config, f"'{inside}' is {reason}; turn that off, so that nothing is recomputed twice")
        elif not (pieces := _pieces(block, why_cache)):
            reason = "the cache stays on, and it takes the cache and holds nothing beside attention to checkpoint"
            _refuse(config, f"block '{block.name}': {reason} ({why_cache}); choose the other blocks with blocks=")
        else:
            taken.append(block)
            applied = asked if pieces == [block] else "sub-modules"
            if applied == "sub-modules":
                names = ", ".join(piece.name.removeprefix(f"{block.name}.") for piece in pieces)
                reason = f"the cache stays on, so attention is run once and keeps what it saves; one by one: {names}"
            if block.part in frozen:
                applied, reason = "none", FROZEN
        asked_here = "none" if reason == "out of scope" else asked
        rows.append(BlockGroup((block.name,), block.part, block.why, asked_here, applied, reason))
    if found and not any(_in_scope(part, config.scope) for part in parts):
        _refuse(config, f"scope: {config.scope!r} holds no block of this model; its parts are {sorted(parts)}")
    return taken, rows


def _pieces(block: Block, why_cache: str) -> list[Block]:
    """The block itself or, where a cache stays on and it takes one, what can be run again inside it."""
    if not (why_cache and takes_cache(block.module)):
        return [block]
    inside = submodules_beside_attention(block.name, block.module)
    return [replace(block, name=name, module=module) for name, module in inside]


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


def _checkpointed_by_others(model: nn.Module) -> Iterator[tuple[str, str]]:
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            yield name, "Hugging Face (model.gradient_checkpointing_enable)"
        elif wrappers is not None and isinstance(module, wrappers.CheckpointWrapper):
            yield name, "torch's checkpoint_wrapper"
