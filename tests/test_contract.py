"""Every settings class that is registered under the entry-point group `ac.config` keeps the contract.

docs/architecture.md states it. A package that registers one, ours or a stranger's, is tested by being installed.
"""

import dataclasses
import subprocess
import sys
import types
import typing
from importlib.metadata import entry_points

import pytest

from ac_recipes.recipe import ModelConfig, Recipe
from ac_recipes.section import Section

REGISTERED = sorted(entry_points(group="ac.config"), key=lambda entry: entry.name)
PLAIN = (bool, int, float, str, type(None))
LLAMA = {"model_type": "llama"}
NEEDED = {"model": ModelConfig(config=LLAMA), "config": LLAMA, "path_or_dataset_id": "records.jsonl"}
"""What a recipe has to say, for there is no default that could be right."""


def test_the_components_and_the_recipe_are_registered():
    names = {entry.name for entry in REGISTERED}
    assert {"activation_checkpointing", "loss_fn", "model.backend", "distributed.fsdp2", "distributed.ddp"} <= names
    classes = {entry.load() for entry in REGISTERED}
    assert settings_in(Recipe) - classes == set(), "what a recipe is read into is registered, and nothing else is"


def settings_in(root):
    """Every dataclass that a value of `root` can hold, itself included."""
    found, waiting = set(), [root]
    while waiting:
        kind = waiting.pop()
        if dataclasses.is_dataclass(kind) and kind not in found:
            found.add(kind)
            waiting += typing.get_type_hints(kind).values()
        waiting += typing.get_args(kind)
    return found


@pytest.fixture(params=REGISTERED, ids=lambda entry: entry.name)
def config(request):
    return request.param.load()


def test_it_is_a_frozen_keyword_only_dataclass(config):
    assert dataclasses.is_dataclass(config)
    assert config.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(config))


def test_what_a_recipe_has_of_its_own_is_a_section(config, monkeypatch):
    """One base refuses what no field of a section allows; a section that does not ask it would check less."""
    is_ours = config.__module__.startswith("ac_recipes.")
    assert issubclass(config, Section) == is_ours
    asked = []
    monkeypatch.setattr(Section, "__post_init__", lambda section: asked.append(type(section)))
    config(**needed_by(config))
    assert (config in asked) == is_ours


def test_it_has_defaults(config):
    needed = [
        field.name
        for field in dataclasses.fields(config)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if config.__module__.startswith("ac_recipes."):
        assert set(needed) <= NEEDED.keys(), "a recipe has to say which model it trains, and on which records"
    else:
        assert needed == []
        assert config() == config()


def test_its_fields_are_plain_data(config):
    def allowed(kind):
        origin = typing.get_origin(kind)
        if origin is typing.Literal:
            return all(isinstance(value, PLAIN) for value in typing.get_args(kind))
        if origin in (typing.Union, types.UnionType, tuple, list, dict):
            return all(allowed(part) for part in typing.get_args(kind) if part is not Ellipsis)
        return kind in PLAIN or kind is typing.Any or dataclasses.is_dataclass(kind)

    hints = typing.get_type_hints(config)
    assert [name for name, kind in hints.items() if not allowed(kind)] == []


def test_a_value_outside_a_fields_choices_is_refused_by_name(config):
    """`ValueError`, beginning with the field and naming the value and a valid one."""
    for name, kind in typing.get_type_hints(config).items():
        choices = [value for value in literals(kind) if isinstance(value, str)]
        if not choices:
            continue
        with pytest.raises(ValueError, match=f"^{name}: 'no such value'") as caught:
            config(**needed_by(config), **{name: "no such value"})
        assert any(choice in str(caught.value) for choice in choices)


def needed_by(config):
    """Values for the fields without which there is no valid section."""
    if config is ModelConfig:
        return {"config": NEEDED["config"]}
    return {field.name: NEEDED[field.name] for field in dataclasses.fields(config) if field.name in NEEDED}


def literals(kind):
    if typing.get_origin(kind) is typing.Literal:
        yield from typing.get_args(kind)
    else:
        for part in typing.get_args(kind):
            yield from literals(part)


def test_settings_load_without_torch():
    """So a bad recipe is refused at once, and `ac-recipes --help` is instant."""
    modules = sorted({entry.module for entry in REGISTERED})
    script = f"import sys, {', '.join(modules)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
