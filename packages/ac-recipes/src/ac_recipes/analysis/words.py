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
    "offload": "distributed: {{activation_checkpointing: {{offload: {}}}}}",
}
"""Where checkpointing has settings of its own."""


def words_for(recipe: Recipe) -> Callable[[Change], str]:
    """How to say a change to this recipe: the setting with its section, as YAML on one line."""
    inside = isinstance(recipe.distributed.activation_checkpointing, ActivationCheckpointingConfig)
    return partial(_said, _PLACES | _INSIDE if inside else _PLACES)


def _said(places: dict[str, str], change: Change) -> str:
    return places[change.setting].format(change.value)
