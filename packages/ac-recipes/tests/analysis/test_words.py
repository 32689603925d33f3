"""What is advised can be written into a recipe as it is said."""

import json
from dataclasses import replace

import pytest
import yaml

from ac_core.advice import CHANGES, OFFLOADED, SPREAD
from ac_recipes.analysis.words import words_for

OWN = {
    "one word": "selective",
    "a mapping": "{policy: selective, layers: 0-}",
    "off": "false",
    "off in a mapping": "{policy: none, layers: 0-}",
}


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_change_is_said_as_the_recipe_can_take_it(tiny, own, change, strategy):
    settings = f"distributed.activation_checkpointing={own}", f"distributed.strategy={strategy}"
    said, _, launch = words_for(tiny(*settings))(change).partition(", in train ")
    recipe = tiny(*settings, *_overrides(yaml.safe_load(said)))
    assert launch == (f"--nproc-per-node {change.dp_size}" if change.dp_size else "")
    assert recipe.distributed.dp_size == change.dp_size
    checkpointing = recipe.distributed.checkpointing
    said = {
        "policy": checkpointing.policy,
        "offload": checkpointing.offload,
        "strategy": recipe.distributed.strategy,
        "loss": recipe.loss_fn.kind,
    }
    assert said[change.setting] == change.value


def test_a_recipe_that_shards_on_one_rank_is_not_told_to_shard(tiny):
    fsdp2, ddp = (words_for(tiny(f"distributed.strategy={strategy}"))(SPREAD) for strategy in ("fsdp2", "ddp"))
    assert fsdp2 == "distributed: {dp_size: 2}, in train --nproc-per-node 2"
    assert ddp == "distributed: {strategy: fsdp2, dp_size: 2}, in train --nproc-per-node 2"


@pytest.mark.parametrize("own", ["{policy: budget, memory_budget: 1MiB, layers: 0-}", "{policy: full, layers: 0-}"])
def test_offloading_as_advised_loses_nothing_that_checkpointing_is_told(tiny, own):
    asked = tiny(f"distributed.activation_checkpointing={own}")
    path, value = words_for(asked)(OFFLOADED).split(": ")
    followed = tiny(f"distributed.activation_checkpointing={own}", f"{path}={value}").distributed.checkpointing
    assert followed == replace(asked.distributed.checkpointing, offload="cpu")


def _overrides(section, path=()):
    """What a mapping sets, each setting alone: the rest of a section stays. What replaces a whole word is set whole."""
    for name, value in section.items():
        whole = isinstance(value, dict) and name == "activation_checkpointing" and "policy" in value
        if isinstance(value, dict) and not whole:
            yield from _overrides(value, (*path, name))
        else:
            yield f"{'.'.join((*path, name))}={json.dumps(value)}"
