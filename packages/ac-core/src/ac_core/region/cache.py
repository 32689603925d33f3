"""The key/value cache while a model trains with checkpointed blocks: off, or kept with attention outside every region.

A recomputed attention layer would append its keys to the cache a second time: 58 of 195 transformers architectures
crash on that. There are two right ways, and one of them holds for a whole model:

1. **Off**, the rule. `use_cache=False` on every config in the model, not only the root's: MT5's decoder holds a deep
   copy of it. Blocks are checkpointed whole. Keys that later layers share travel as explicit states then, an argument
   that a recompute reads again (Gemma3n and Gemma4), and gradients are exact.
2. **Kept**. No config is touched. A block that takes a cache is checkpointed child by child, without its attention
   (:mod:`ac_core.region.submodules`), and one that takes none is checkpointed whole.

The cache is kept where the caller says so (`keep_cache=True`) and where the model says that it is another function
without one:

* a config declares that layers share keys (`num_kv_shared_layers=2`; any field named for both), and no forward in the
  blocks takes shared states, so that only the cache can carry them;
* a block declares that it only reads a cache (`_can_checkpoint_with_cache` of transformers' layers, as in
  DiffusionGemma), so that others have to fill one. Such a block may be run again and is checkpointed whole.

Whether a model makes a cache whatever its config says, or a caller passes one (prefix tuning), only the run shows. A
checkpointed block that is handed one raises and names `keep_cache`: nothing falls back behind the report's back.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ac_core.errors import ActivationCheckpointingError

_CACHE_ARGUMENT = re.compile(r"(?!use_)(\w+_)?caches?(_params)?|past_(key|kv)\w*|layer_past")
_SHARED_ARGUMENT = re.compile(r"(?=\w*shared)\w*(kv|key|state)\w*")


def turn_cache_off(model: nn.Module) -> list[tuple[Any, Any]]:
    """Set `use_cache` to False on every config in `model` that has it on.

    Returns:
        Each config that was changed, with its former value, for `turn_cache_on`.

    Raises:
        ActivationCheckpointingError: a config does not let itself be changed; none is changed then.
    """
    changed: list[tuple[Any, Any]] = []
    for config in _configs(model):
        before = getattr(config, "use_cache", None)
        if not before:
            continue
        try:
            config.use_cache = False
        except AttributeError as error:
            turn_cache_on(changed)
            raise ActivationCheckpointingError(
                f"the key/value cache has to be off, but {type(config).__name__}.use_cache={before!r} is read-only; "
                "build the model with use_cache=False, or keep the cache with keep_cache=True"
            ) from error
        changed.append((config, before))
    return changed


def cache_settings(model: nn.Module) -> list[tuple[Any, Any]]:
    """Each config in `model` that says whether there is a cache, with what it says, for `turn_cache_on`."""
    return [(config, config.use_cache) for config in _configs(model) if hasattr(config, "use_cache")]


def turn_cache_on(changed: list[tuple[Any, Any]]) -> None:
    """Undo `turn_cache_off`."""
    for config, before in changed:
        config.use_cache = before


def why_cache_is_needed(model: nn.Module, blocks: Iterable[nn.Module]) -> str:
    """What in `model` says that it is another function without its cache; empty where nothing does."""
    blocks = list(blocks)
    if any(only_reads_cache(block) for block in blocks):
        return "some of its blocks only read a cache that others fill"
    field = next((f for config in _configs(model) for f in _shares_keys(config)), None)
    if field is None or not any(map(takes_cache, blocks)) or any(_takes(block, _SHARED_ARGUMENT) for block in blocks):
        return ""
    return f"its layers share keys through the cache ({field})"


def takes_cache(module: nn.Module) -> bool:
    """Whether the forward of `module`, or of a module inside it, has an argument for a key/value cache to append to."""
    return not only_reads_cache(module) and _takes(module, _CACHE_ARGUMENT)


def only_reads_cache(module: nn.Module) -> bool:
    """Whether `module` declares, as transformers' layers do, that it leaves a cache that it is given as it was."""
    return bool(getattr(module, "_can_checkpoint_with_cache", False))


def is_cache(value: object) -> bool:
    """A key/value cache, recognised by what it can do."""
    return callable(getattr(value, "update", None)) and callable(getattr(value, "get_seq_length", None))


def _takes(module: nn.Module, argument: re.Pattern[str]) -> bool:
    return any(argument.fullmatch(name) for inner in module.modules() for name in _argument_names(inner.forward))


def _argument_names(forward: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(forward).parameters
    except ValueError:  # compiled code, which says nothing about itself
        return ()


def _shares_keys(config: Any) -> Iterator[str]:
    """Fields by which a config declares that layers share keys, as `name=value`."""
    for name, value in getattr(config, "__dict__", {}).items():
        if "kv" in name and "shar" in name and (value is True or (isinstance(value, int) and value > 0)):
            yield f"{name}={value}"


def _configs(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()

    def visit(config: Any) -> Iterator[Any]:
        if config is None or id(config) in seen:
            return
        seen.add(id(config))
        yield config
        for name in getattr(type(config), "sub_configs", None) or {}:
            yield from visit(getattr(config, name, None))

    for module in model.modules():
        yield from visit(getattr(module, "config", None))
