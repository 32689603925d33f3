"""The two verbs: apply a policy to a model, and take it off again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ac_core.choice import choose
from ac_core.config import ActivationCheckpointingConfig, PolicyName, Scope
from ac_core.discovery.blocks import BlockChoice, find_blocks, misses
from ac_core.errors import ActivationCheckpointingError
from ac_core.proof.trace import trace_if_asked
from ac_core.region.cache import turn_cache_off, turn_cache_on
from ac_core.region.contexts import ComposedContextFn, ContextFn
from ac_core.region.forward import CheckpointedForward, checkpointed_forwards
from ac_core.region.offload import HostMemory, Offload
from ac_core.region.state import state_contexts
from ac_core.report import Report, group_blocks
from ac_core.selective.policy import select_calls
from ac_core.selective.sites import detach_sites
from ac_core.strategies import DDPConfig, FSDP2Config, MegatronFSDPConfig

StrategyConfig = FSDP2Config | DDPConfig | MegatronFSDPConfig
_RECORD = "_ac_core_applied"


@dataclass
class _Applied:
    """Left on the model that `apply` was called with, inside of wrappers such as DDP, so that `remove` can undo it,
    from a copy, an unpickled or an unwrapped model as well."""

    configs_with_cache: list[tuple[Any, Any]]


def apply_activation_checkpointing(
    model: nn.Module,
    config: ActivationCheckpointingConfig | StrategyConfig | bool | PolicyName | None = True,
    *,
    scope: Scope | list[str] | None = None,
    blocks: BlockChoice | Iterable[BlockChoice] | None = None,
    context_fn: ContextFn | Iterable[ContextFn] | None = None,
    batch: Any = None,
) -> Report:
    """Checkpoint the blocks of `model`, in place, and say what was done.

    The forward of each chosen block is replaced on the instance; the module tree, parameter names, `state_dict` keys
    and classes stay as they are. The key/value cache is turned off on every config in the model; where it has to stay
    on, blocks are checkpointed child by child around their attention, and the report says why. Blocks of a part that is
    frozen are left out until something in them needs a gradient. May be called before or after `fully_shard`, and
    before `DistributedDataParallel` or with the wrapped model. A mistake is raised before anything is changed.

    Args:
        model: any module.
        config: a policy (`True` or `"full"`, `"selective"`; `False`, `None` or `"none"`), an
            `ActivationCheckpointingConfig`, or a strategy's config such as `FSDP2Config`.
        scope: shorthand for the field of that name, where `config` is a policy.
        blocks: what to take for blocks instead of what the rules find; see `find_blocks`.
        context_fn: `() -> (forward_context, recompute_context)`, as `torch.utils.checkpoint` takes it, or several: each
            is entered around every forward and recompute of a block, the first outermost. Contexts must be
            re-enterable.
        batch: for a `memory_budget` without a plan: what the model is called with, at the size that it is to fit; only
            its shapes count. The plan is for one process with AdamW; `ac_core.plan` makes it for other set-ups. Not
            needed otherwise.

    Returns:
        The report: asked and applied for every block of the model.

    Raises:
        ValueError: a setting has no such value.
        ActivationCheckpointingError: no block is recognised, the scope holds none, checkpointing is already on (ours or
            another tool's). With `strict=False` these warn. A plan does not fit the model, or none fits the budget.
    """
    config = getattr(config, "checkpointing", config)  # of a strategy's config
    if not isinstance(config, ActivationCheckpointingConfig):
        config = ActivationCheckpointingConfig(policy=config, scope=scope if scope is not None else "all")
    elif scope is not None:
        raise ValueError(f"scope: {scope!r} is given beside a config; put it in the config")
    if isinstance(model, nn.DataParallel):
        raise ActivationCheckpointingError(
            "model: nn.DataParallel copies a module's attributes, so that its replicas would run the weights of the "
            "original; use torch.nn.parallel.DistributedDataParallel"
        )
    if config.policy == "budget" and config.plan is None:
        config = _planned(model, config, blocks, batch)
    found = find_blocks(model, blocks)
    if found and blocks is not None and (problems := misses(model, blocks)):
        raise ActivationCheckpointingError(f"blocks: {problems[0]}")
    if checkpointed_forwards(model) or any(_RECORD in vars(module) for module in model.modules()):
        raise ActivationCheckpointingError(
            "ac-core already checkpoints this model; call remove_activation_checkpointing(model) first"
        )
    choice = choose(model, found, config, chosen_by_caller=blocks is not None)
    callers = _context_fns(context_fn)
    selective = select_calls(choice.regions, "save" if config.plan is None else "plan", strict=config.strict)
    # A plan in which no block is checkpointed was made without the cache as well.
    trains = bool(choice.regions) or config.policy == "budget"
    cached = turn_cache_off(model) if trains and not choice.why_cache else []
    memory = HostMemory()
    for place, region in enumerate(choice.regions):
        chosen = selective.attach(region.name)
        region.module.forward = CheckpointedForward(  # type: ignore[assignment]
            region.module,
            region.name,
            block=region.block.module,
            preserve_rng_state=config.preserve_rng_state,
            early_stop=config.early_stop,
            state_fn=ComposedContextFn(state_contexts(region.module, region.name)),
            context_fn=_compose([*callers, *(eager for eager, _ in chosen)]),
            compiled_context_fn=_compose([*callers, *(compiled for _, compiled in chosen)]),
            offload=Offload(memory, place, region.name) if region.offload else None,
        )
    notes = []
    if choice.regions:
        trace_if_asked()
    if trains:
        setattr(_inside_wrappers(model), _RECORD, _Applied(cached))
    if cached:
        plural = "s" if len(cached) > 1 else ""
        notes.append(f"key/value cache turned off for training (use_cache=False on {len(cached)} config{plural})")
    elif trains and choice.why_cache:
        notes.append(f"key/value cache left on: {choice.why_cache}")
    if offloaded := len({id(region.block) for region in choice.regions if region.offload}):
        notes.append(f"inputs of {offloaded} block{'s' * (offloaded > 1)} kept in host memory (offload: cpu)")
    notes += selective.notes
    scopes = (config.scope,) if isinstance(config.scope, str) else config.scope
    return Report(str(config.policy), scopes, group_blocks(choice.rows), tuple(notes))


def remove_activation_checkpointing(model: nn.Module) -> None:
    """Undo `apply_activation_checkpointing` on a model, or on a copy or wrapper of it; harmless where nothing is on."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module")
    detach_sites(model)
    for module, forward in checkpointed_forwards(model):
        if forward.replaced is None:
            del module.forward
        else:
            module.forward = forward.replaced
    for module in model.modules():
        applied = module.__dict__.pop(_RECORD, None)
        if applied is not None:
            turn_cache_on(applied.configs_with_cache)


def _planned(model: nn.Module, config: ActivationCheckpointingConfig, blocks: Any, batch: Any) -> Any:
    """The config with a plan for its budget."""
    if batch is None:
        raise ActivationCheckpointingError(
            f"memory_budget: to plan for {config.memory_budget!r}, the size of a batch has to be known; give one as "
            "apply_activation_checkpointing(model, config, batch=...), or make the plan before and give its config: "
            "ac_core.plan(model, batch_size=..., sequence_length=..., budget=...).to_config()"
        )
    from ac_core.planning.planner import plan_here  # it applies policies itself

    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ActivationCheckpointingError(
            "memory_budget: this model is wrapped for DDP, whose buckets hold every gradient a second time, and a plan "
            "is made here for one process; make it before: ac_core.plan(model, ..., strategy='ddp', dp_size=...)"
            ".to_config()"
        )
    return plan_here(model, config, batch, blocks).to_config()


def _inside_wrappers(model: nn.Module) -> nn.Module:
    while len(children := list(model.children())) == 1:
        model = children[0]
    return model


def _context_fns(context_fn: ContextFn | Iterable[ContextFn] | None) -> list[ContextFn]:
    several = [context_fn] if context_fn is None or callable(context_fn) else context_fn
    if not isinstance(several, Iterable) or not all(function is None or callable(function) for function in several):
        raise TypeError(
            f"context_fn: {context_fn!r} is not callable: give a function that returns (forward_context, "
            "recompute_context), or several"
        )
    return [function for function in several if function is not None]


def _compose(several: list[ContextFn]) -> ContextFn | None:
    return ComposedContextFn(several) if len(several) > 1 else next(iter(several), None)
