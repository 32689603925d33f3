"""The facts that blocks are found by."""

import torch
from torch import nn

from ac_core.discovery.structure import Structure, arguments, is_torchs, kind, unwrapped


class Unit(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2) if norm else nn.Identity()

    def forward(self, x, *, mask=None):
        return self.norm(self.b(self.a(x)))


class Stage(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(**options) for _ in range(2))
        self.down = nn.Linear(2, 2)

    def forward(self, x):
        return self.down(x)


def facts(module):
    return Structure(module).facts(module)


def test_facts_of_a_unit_and_of_a_stage():
    unit, stage = facts(Unit()), facts(Stage())
    assert (unit.matrices, unit.composite, unit.light, unit.norm, unit.embedding) == (2, True, True, True, False)
    assert (unit.holds_units, unit.is_stage) == (False, False)
    assert (stage.matrices, stage.in_units, stage.holds_units, stage.is_stage) == (5, 4, True, True)
    assert not facts(Stage(norm=False)).is_stage, "units without a norm are experts"


def test_a_stage_is_made_of_its_units():
    block = Stage()
    block.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))
    assert not facts(block).is_stage, "most of its matrices are elsewhere"


def test_units_are_most_of_a_container_and_of_one_kind():
    def units(*children):
        return len(facts(nn.ModuleList(children)).units)

    assert units(Unit(), Unit(), nn.ReLU(), nn.ReLU()) == 2
    assert units(Unit(), Unit(), nn.ReLU(), nn.ReLU(), nn.ReLU()) == 0
    assert units(Unit(), Stage(), nn.Sequential(Unit(), nn.ReLU())) == 0
    assert len(facts(Stage()).units) == 0, "no container"


def test_what_counts_as_a_matrix():
    def matrices(*shape):
        module = nn.Module()
        module.p = nn.Parameter(torch.empty(shape))
        return facts(module).matrices

    counted = [(4, 3), (8, 1), (4, 1, 3), (4, 3, 2, 2)]
    broadcast = [(4,), (4, 1, 1), (1, 9, 4), (1, 1, 4)]
    assert [shape for shape in [*counted, *broadcast] if matrices(*shape)] == counted


def test_a_norm_has_vectors_and_nothing_else():
    class NormAct(nn.BatchNorm2d):
        def __init__(self) -> None:
            super().__init__(2)
            self.act = nn.ReLU()

    assert facts(NormAct()).norm
    assert not facts(nn.Linear(2, 2)).norm
    assert not facts(nn.ReLU()).norm


def test_the_class_that_was_written_and_the_module_that_was_wrapped():
    unit = Unit()
    assert unwrapped(nn.DataParallel(torch.compile(unit))) is unit
    assert unwrapped(unit) is unit
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert type(linear) is not nn.Linear
    assert kind(linear) is nn.Linear
    assert is_torchs(nn.Linear)
    assert not is_torchs(Unit)


def test_arguments_are_those_of_the_class():
    assert arguments(Unit()) == ("x", "mask")
    assert arguments(nn.ModuleList()) == ("input",)
