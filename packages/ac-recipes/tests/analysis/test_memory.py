"""The memory of a step is what was allocated in it."""

import torch

from ac_recipes.analysis.memory import Timeline, bytes_of, record_memory

MIB = 2**20


def test_what_is_alive_is_followed_up_and_down(capfd):
    def step():
        kept = torch.empty(MIB, dtype=torch.uint8)
        for _ in range(3):
            torch.empty(2 * MIB, dtype=torch.uint8)
        del kept

    timeline = record_memory(step, torch.device("cpu"), before=100)
    assert timeline.peak == 100 + 3 * MIB
    assert timeline.alive[-1] == 100
    assert list(timeline.alive).count(100 + 3 * MIB) == 3
    assert list(timeline.seconds) == sorted(timeline.seconds)
    assert capfd.readouterr() == ("", "")


def test_thinned_points_keep_the_extremes():
    alive = tuple(1000 + (n * 37) % 101 for n in range(1000))
    timeline = Timeline(tuple(n / 1000 for n in range(1000)), alive, before=5)
    points = timeline.thinned(10)
    assert len(points) <= 21
    assert points[0] == (0.0, 5)
    assert max(size for _, size in points) == max(alive)
    assert [when for when, _ in points] == sorted(when for when, _ in points)
    assert Timeline((), (), before=5).thinned(10) == [(0.0, 5)]


def test_a_storage_that_two_tensors_share_counts_once():
    whole = torch.empty(100)
    assert bytes_of([whole, whole[10:], torch.empty(1)]) == 404
