"""Inputs in host memory as one more option of each block: never over budget, and cheaper where memory is short."""

import random
from dataclasses import replace

import pytest
import torch

import ac_core
from ac_core import ActivationCheckpointingError
from ac_core.choice import is_offloaded, without_offload
from ac_core.planning.measuring import measured
from ac_core.planning.planner import fit

ROWS, SEQUENCE = 32, 24
BOUNDARY = ROWS * SEQUENCE * 32 * 4  # larger than the gradients of a block


@pytest.fixture(scope="module")
def batch():
    ids = torch.arange(ROWS * SEQUENCE).reshape(ROWS, SEQUENCE) % 128
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def offloading(bench_for, decoder, batch):
    bench = bench_for(decoder, batch, offload="cpu")
    return bench, *measured(bench)


def least(bench, course, plain):
    with pytest.raises(ActivationCheckpointingError, match="no plan fits") as told:
        fit("50KiB", bench, course, plain)
    return int(str(told.value).partition("Give at least ")[2].partition(" bytes")[0])


def test_figures_are_those_of_the_same_option_but_for_the_boundary(offloading):
    _, course, _ = offloading
    figures = course.options["layers.2"]
    moved = [option for option in figures if is_offloaded(option)]
    assert len(moved) == len(figures) // 2 == 5
    for option in moved:
        here, there = figures[without_offload(option)], figures[option]
        assert (there.host, there.flops) == (BOUNDARY, here.flops)
        assert there.kept == here.kept - BOUNDARY
        assert course.cost(here) < course.cost(there)


@pytest.mark.parametrize("seed", range(2))
def test_a_random_mix_is_predicted_to_a_boundary_or_two(offloading, seed):
    bench, course, _ = offloading
    draw = random.Random(seed)
    chosen = {name: draw.choice(list(course.options[name])) for name in course.order}
    simulated = bench.run(chosen, "full")
    assert abs(course.peak(chosen) - simulated.peak) <= 2 * BOUNDARY
    assert simulated.host == sum(course.options[name][option].host for name, option in chosen.items())
    assert course.totals(chosen)[1] == simulated.recompute_flops


def test_it_fits_where_nothing_did_and_measures_as_it_says(offloading, decoder, batch, resident):
    smallest = least(*offloading)
    _, course, _ = offloading
    here = {o: figures for o, figures in course.options["layers.0"].items() if not is_offloaded(o)}
    on_the_device = replace(course, options=dict.fromkeys(course.order, here))
    assert smallest < on_the_device.peak(on_the_device.smallest())
    plan = fit(smallest, *offloading)
    model = decoder()
    ac_core.apply_activation_checkpointing(model, plan.to_config())
    usage = ac_core.measure(model, batch)
    assert plan.peak_bytes == usage.peak_bytes + resident(model, batch) == smallest
    assert plan.host_bytes == usage.host_bytes > 0
    assert plan.recompute_flops == usage.recompute_flops
    assert "inputs on the host" in str(plan)
    assert ac_core.verify(decoder(), batch, plan.to_config()).equal
    assert ac_core.Plan.from_dict(plan.to_dict()) == plan


def test_with_enough_memory_nothing_leaves_the_device(offloading):
    plan = fit(0.9, *offloading)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.host_bytes == 0
