"""Turning the key/value cache off while a model trains with checkpointed blocks.

A cache makes the recompute of an attention layer append its keys a second time: 58 of 195 transformers architectures
crash on that. Every module's own `config` counts, not only the root's: MT5's decoder holds a deep copy of it.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn


def turn_cache_off(model: nn.Module) -> list[Any]:
    """Set `use_cache` to False on every config in `model` that has it on; returns those configs."""
    changed = [config for config in _configs(model) if getattr(config, "use_cache", None) is True]
    for config in changed:
        config.use_cache = False
    return changed


def turn_cache_on(configs: list[Any]) -> None:
    """Undo `turn_cache_off`."""
    for config in configs:
        config.use_cache = True


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
