"""What is advised can be written into a recipe as it is said."""

import pytest

from ac_core.advice import CHANGES
from ac_recipes.analysis.words import words_for

OWN = {"one word": "selective", "a mapping": "{policy: selective, layers: 0-}"}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_change_is_said_as_the_recipe_can_take_it(tiny, own, change):
    own = f"distributed.activation_checkpointing={own}"
    name, _, value = words_for(tiny(own))(change).partition(": ")
    while value.startswith("{"):  # as an override, which leaves the rest of the section as it is
        inner, _, value = value[1:-1].partition(": ")
        name = f"{name}.{inner}"
    recipe = tiny(own, f"{name}={value}")
    checkpointing = recipe.distributed.checkpointing
    said = {
        "policy": checkpointing.policy,
        "offload": checkpointing.offload,
        "strategy": recipe.distributed.strategy,
        "loss": recipe.loss_fn.kind,
    }
    assert said[change.setting] == change.value
