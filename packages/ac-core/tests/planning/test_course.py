"""The memory of a step as a function of the choice: to the byte, for any mix."""

import random

import pytest

from ac_core.planning.course import stations


@pytest.mark.parametrize("seed", range(2))
def test_a_random_mix_has_the_peak_and_the_flops_that_its_figures_say(of_decoder, seed):
    bench, course, _ = of_decoder
    draw = random.Random(seed)
    chosen = {name: draw.choice(list(course.options[name])) for name in course.order}
    simulated = bench.run(chosen, "full")
    # A region holds the state of the generator besides, which figures taken from a step of regions have everywhere.
    assert 0 <= course.peak(chosen) - simulated.peak <= 1024
    assert course.totals(chosen)[1] == simulated.recompute_flops


def test_more_is_kept_and_less_is_run_again_from_one_set_to_the_next(of_decoder):
    _, course, _ = of_decoder
    figures = course.options["layers.2"]
    order = [figures["full"], *(f for option, f in figures.items() if isinstance(option, tuple)), figures["none"]]
    assert len(order) == 6
    assert [f.kept for f in order] == sorted({f.kept for f in order})
    assert [f.flops for f in order] == sorted((f.flops for f in order), reverse=True)
    assert [f.rewritten for f in order] == sorted((f.rewritten for f in order), reverse=True)
    assert figures["none"].rewritten == figures["none"].flops == 0


def test_blocks_of_one_structure_share_their_figures(of_decoder):
    _, course, _ = of_decoder
    assert course.order == tuple(f"layers.{index}" for index in range(5))
    assert all(course.options[name] is course.options["layers.0"] for name in course.order)


def test_stations_are_the_backwards_of_blocks_and_the_stretches_between(of_decoder):
    _, course, plain = of_decoder
    found = stations(plain, course.order, forwards=False)
    assert {place for place, _ in found} == {*course.order, 0, 5}
    assert max(size for _, size in found) == plain.peak
    assert {place for place, _ in stations(plain, course.order, forwards=True)} == {*course.order, 0, 1, 2, 3, 4, 5}


def test_the_curve_falls_from_no_checkpointing_to_the_smallest_peak(of_decoder):
    _, course, _ = of_decoder
    curve = course.curve(16)
    peaks, costs = [peak for peak, _ in curve], [course.totals(chosen)[2] for _, chosen in curve]
    assert peaks == sorted(peaks, reverse=True)
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert set(curve[0][1].values()) == {"none"}
    assert course.solve(peaks[-1] - 1) is None
    assert course.peak(course.smallest()) == peaks[-1]
