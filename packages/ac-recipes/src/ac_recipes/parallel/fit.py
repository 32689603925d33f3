"""The sizes of a `distributed:` section against the configuration of the model, before anything is built."""

from collections.abc import Iterator
from typing import Any

from ac_recipes.model_config import transformers_config
from ac_recipes.reader import Problem
from ac_recipes.recipe import Recipe

_SHARED_OUT = {
    "tp_size": ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"),
    "ep_size": ("num_experts", "num_local_experts", "n_routed_experts"),
}
"""What ranks share out equally, by the names that transformers' configurations have for it."""


def check_fit(recipe: Recipe) -> Iterator[Problem]:
    """What of `model.config` cannot be shared out by `tp_size` or `ep_size` ranks. Imports transformers."""
    from transformers import CONFIG_MAPPING

    fields = recipe.model.config
    asked = {size: getattr(recipe.distributed, size) for size in _SHARED_OUT}
    if all(size == 1 for size in asked.values()) or not fields or fields["model_type"] not in CONFIG_MAPPING:
        return
    try:
        config = transformers_config(fields)
    except Exception:  # noqa: BLE001 - check_model_config tells what is wrong with it
        return
    config = config.get_text_config()
    for name, size in asked.items():
        yield from _problems(config, name, size)


def _problems(config: Any, name: str, size: int) -> Iterator[Problem]:
    path = ("distributed", name)
    counts = {field: getattr(config, field, None) for field in _SHARED_OUT[name]}
    counts = {field: count for field, count in counts.items() if isinstance(count, int)}
    kind = type(config).__name__.removesuffix("Config")
    if size == 1:
        return
    if name == "tp_size" and not getattr(config, "base_model_tp_plan", None):
        message = f"transformers has no tensor-parallel plan for {kind}; leave it at 1, and shard with strategy 'fsdp2'"
        yield Problem(path=path, message=message)
        return
    if name == "ep_size" and not counts:
        yield Problem(path=path, message=f"{size}: {kind} has no experts to share out; leave it at 1")
    for field, count in counts.items():
        if count % size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and n <= 64)
            message = f"{size} ranks cannot share out {field} {count} equally; choose one of {fitting}"
            yield Problem(path=path, message=message)
            return
