"""A small schema with every sort of field, and two ways to read recipes of it.

Test modules cannot import one another here (`--import-mode=importlib`), so they get all of it as fixtures.
"""

import textwrap
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from ac_recipes.reader import RecipeError, fields_of, read_recipe, split_overrides


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    policy: Literal["none", "full", "selective", "budget"] = "full"
    scope: str | tuple[str, ...] = "all"
    memory_budget: float | str | None = None
    early_stop: bool = True

    def __post_init__(self):
        for part in [self.scope] if isinstance(self.scope, str) else self.scope:
            if part not in ("all", "language", "vision"):
                raise ValueError(f"scope: {part!r} is not one of 'all', 'language', 'vision'")
        if self.policy == "budget" and self.memory_budget is None:
            raise ValueError("memory_budget: needed for the policy 'budget'")
        if isinstance(self.memory_budget, float) and self.memory_budget < 0:
            raise ValueError(f"the budget is {self.memory_budget};\nit must not be negative")


Asked = bool | Literal["none", "full", "selective", "budget"] | Checkpointing | None


@dataclass(frozen=True, kw_only=True)
class FSDP2:
    strategy: Literal["fsdp2"] = "fsdp2"
    activation_checkpointing: Asked = None
    reshard_after_forward: bool = True
    dp_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class DDP:
    strategy: Literal["ddp"] = "ddp"
    activation_checkpointing: Asked = None
    find_unused_parameters: bool = False


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layer:
    width: int
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    model: str
    seed: int = 0
    bits: Literal["16", "32", "off"] | None = None
    steps: int | str = 10
    distributed: FSDP2 | DDP = FSDP2()
    optimizer: Optimizer = Optimizer()
    layers: list[Layer] = field(default_factory=list)
    tags: list[str] | dict[str, str] = field(default_factory=list)
    extra: Any = None


@pytest.fixture(scope="session")
def schema():
    """The dataclasses above."""
    return SimpleNamespace(
        Recipe=Recipe, Checkpointing=Checkpointing, FSDP2=FSDP2, DDP=DDP, Optimizer=Optimizer, Layer=Layer
    )


@pytest.fixture(scope="session")
def read():
    """`read(text, *argv)`: the recipe of a text and a command line."""

    def read(text, *argv, schema=Recipe):
        rest, overrides = split_overrides(argv, fields_of(schema))
        assert rest == []
        return read_recipe(schema, "r.yaml", overrides, text=textwrap.dedent(text))

    return read


@pytest.fixture(scope="session")
def mistakes(read):
    """`mistakes(text, *argv)`: the lines that reading them prints."""

    def mistakes(text, *argv, schema=Recipe):
        with pytest.raises(RecipeError) as caught:
            read(text, *argv, schema=schema)
        return str(caught.value).splitlines()

    return mistakes


@pytest.fixture(scope="session")
def field_of(read):
    """`field_of(annotation, text)`: the value of a field of that type, written as `text`."""

    def field_of(annotation, text):
        return read(f"x: {text}\n", schema=_one_field(annotation)).x

    return field_of


@pytest.fixture(scope="session")
def mistake_of(mistakes):
    """`mistake_of(annotation, text)`: the one mistake of such a field, without its place."""

    def mistake_of(annotation, text):
        (line,) = mistakes(f"x: {text}\n", schema=_one_field(annotation))
        return line.partition(": x: ")[2]

    return mistake_of


def _one_field(annotation):
    return dataclass(frozen=True)(type("One", (), {"__annotations__": {"x": annotation}, "__module__": __name__}))
