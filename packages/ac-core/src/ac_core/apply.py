"""The two verbs: apply a policy to a model, and take it off again."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ac_core.config import ActivationCheckpointingConfig, PolicyName, Scope
from ac_core.discovery.blocks import Block, BlockChoice, candidate_containers, find_blocks
from ac_core.discovery.parts import LANGUAGE, part_of
from ac_core.errors import ActivationCheckpointingError
from ac_core.region.cache import turn_cache_off, turn_cache_on
from ac_core.region.contexts import ComposedContextFn, ContextFn
from ac_core.region.forward import CheckpointedForward, checkpointed_forwards
from ac_core.region.state import state_contexts
from ac_core.report import BlockGroup, Report, group_blocks

_RECORD = "_ac_core_applied"


@dataclass
class _Applied:
    """Left on the model that `apply` was called with, so that `remove` can undo it, from a copy or an unpickled model
    as well."""

    configs_with_cache: list[Any]


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
    and classes stay as they are. The key/value cache is turned off on every config in the model. May be called before
    or after `fully_shard`, and before `DistributedDataParallel` or with the wrapped model. A mistake is raised before
    anything is changed.

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
    taken, rows = _choose(model, found, config, chosen_by_caller=blocks is not None)
    context = _compose(context_fn)
    for block in taken:
        block.module.forward = CheckpointedForward(  # type: ignore[assignment]
            block.module,
            block.name,
            preserve_rng_state=config.preserve_rng_state,
            early_stop=config.early_stop,
            context_fn=context,
            state_fn=ComposedContextFn(state_contexts(block.module, block.name)),
        )
    notes = []
    if taken:
        configs = turn_cache_off(model)
        setattr(model, _RECORD, _Applied(configs))
        if configs:
            plural = "s" if len(configs) > 1 else ""
            notes.append(f"key/value cache turned off for training (use_cache=False on {len(configs)} config{plural})")
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


def _compose(context_fn: ContextFn | Iterable[ContextFn] | None) -> ContextFn | None:
    """What the caller wants entered around each run of a block, as one."""
    several = [context_fn] if callable(context_fn) else list(context_fn or ())
    for function in several:
        if not callable(function):
            raise TypeError(f"context_fn: {function!r} is not callable")
    return ComposedContextFn(several) if len(several) > 1 else next(iter(several), None)


def _choose(
    model: nn.Module, found: list[Block], config: ActivationCheckpointingConfig, *, chosen_by_caller: bool
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
    trainable_parts = {part_of(model, name) for name, p in model.named_parameters() if p.requires_grad}
    taken, rows = [], []
    for block in found:
        reason = ""
        inside = next((n for n in foreign if n == block.name or n.startswith(f"{block.name}.")), None)
        if not _in_scope(block.part, config.scope):
            reason = "out of scope"
        elif block.part != LANGUAGE and block.part not in trainable_parts:
            reason = "frozen: nothing in this part needs a gradient, so it saves nothing"
        elif inside is not None:
            reason = f"already checkpointed by {foreign[inside]}"
            _refuse(config, f"'{inside}' is {reason}; turn that off, so that nothing is recomputed twice")
        else:
            taken.append(block)
        asked_here = "none" if reason == "out of scope" else asked
        rows.append(BlockGroup((block.name,), block.part, block.why, asked_here, "none" if reason else asked, reason))
    if found and not any(_in_scope(part, config.scope) for part in parts):
        _refuse(config, f"scope: {config.scope!r} holds no block of this model; its parts are {sorted(parts)}")
    return taken, rows


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
