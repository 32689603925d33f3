"""The sizes of a `distributed:` section against the configuration of the model, before anything is built."""

from collections.abc import Collection, Iterator
from typing import Any

from ac_recipes.model_config import transformers_config
from ac_recipes.model_sizes import EXPERTS
from ac_recipes.reader import Problem
from ac_recipes.recipe import Recipe

SHARED_OUT = {
    "tp_size": ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"),
    "ep_size": EXPERTS,
}
"""What ranks share out equally, by the names that transformers' configurations have for it."""


def check_fit(recipe: Recipe) -> Iterator[Problem]:
    """What of `model.config` cannot be shared out by `tp_size` or `ep_size` ranks. Imports transformers."""
    from transformers import CONFIG_MAPPING

    fields = recipe.model.config
    if all(getattr(recipe.distributed, size) == 1 for size in SHARED_OUT) or not fields:
        return
    if fields["model_type"] not in CONFIG_MAPPING:
        return
    try:
        config = transformers_config(fields)
    except Exception:  # noqa: BLE001 - check_model_config tells what is wrong with it
        return
    config = config.get_text_config()
    kind = type(config).__name__
    if recipe.distributed.tp_size > 1 and not getattr(config, "base_model_tp_plan", None):
        named = kind.removesuffix("Config")
        yield Problem(
            path=("distributed", "tp_size"),
            message=f"transformers has no tensor-parallel plan for {named}; leave it at 1, and shard with strategy "
            "'fsdp2'",
        )
        return
    shared = {name for name, counts in SHARED_OUT.items() if any(hasattr(config, count) for count in counts)}
    yield from size_problems(recipe, config, kind, shared)


def size_problems(recipe: Recipe, config: Any, kind: str, shared: Collection[str]) -> Iterator[Problem]:
    """The same for values that are known: `config` has them as attributes. kind: the class of the configuration;
    shared: the sizes whose ranks have something in it to share out."""
    for name, fields in SHARED_OUT.items():
        size, path = getattr(recipe.distributed, name), ("distributed", name)
        if size > 1 and name == "ep_size" and name not in shared:
            message = f"{size}: {kind.removesuffix('Config')} has no experts to share out; leave it at 1"
            yield Problem(path=path, message=message)
        counts = {field: getattr(config, field, None) for field in fields}
        for field, count in counts.items():
            if isinstance(count, int) and count % size:
                fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and n <= 64)
                message = f"{size} ranks cannot share out {field} {count} equally; choose one of {fitting}"
                yield Problem(path=path, message=message)
                break
