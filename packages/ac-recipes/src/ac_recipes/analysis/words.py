"""What ac-core advises, as a recipe says it. Loads without torch."""

from collections.abc import Callable
from functools import partial

from ac_core import ActivationCheckpointingConfig
from ac_core.advice import Change
from ac_recipes.recipe import Recipe

_PLACES = {
    "policy": "distributed: {{activation_checkpointing: {}}}",
    "offload": "distributed: {{activation_checkpointing_offload: {}}}",
    "strategy": "distributed: {{strategy: {}}}",
    "loss": "loss_fn: {{kind: {}}}",
}
_INSIDE = {
    "policy": "distributed: {{activation_checkpointing: {{policy: {}}}}}",
    "offload": "distributed.activation_checkpointing.offload: {}",
}
"""Where checkpointing has settings of its own. A mapping there, given as an override, would take the place of them all,
and of the budget with them."""
_OFF = {"offload": "distributed: {{activation_checkpointing: {{policy: full, offload: {}}}}}"}
"""Where it is off: there are no inputs to move unless it is turned on."""


def words_for(recipe: Recipe) -> Callable[[Change], str]:
    """How to say a change to this recipe: the setting with its section, as YAML on one line, or its dotted path."""
    distributed = recipe.distributed
    places = dict(_PLACES)
    if isinstance(distributed.activation_checkpointing, ActivationCheckpointingConfig):
        places |= _INSIDE
    if distributed.checkpointing.policy == "none":
        places |= _OFF
    return partial(_said, places, distributed.strategy)


def _said(places: dict[str, str], strategy: str, change: Change) -> str:
    if change.dp_size is None:
        return places[change.setting].format(change.value)
    other = "" if change.value == strategy else f"strategy: {change.value}, "
    return f"distributed: {{{other}dp_size: {change.dp_size}}}, in train --nproc-per-node {change.dp_size}"
