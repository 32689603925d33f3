import pytest

from tools.bench.meter import Memory
from tools.bench.results import MIB, Goal, Row, full_goals, host_goals, selective_goals


def row(owner: str, policy: str, ratio: float, held: float, *, name: str = "", per_block: float = 0.0) -> Row:
    return Row(
        name=name or f"{owner} {policy}",
        owner=owner,
        policy=policy,
        milliseconds=100 * ratio,
        ratio=ratio,
        spread=0.0,
        best=ratio,
        per_block=per_block,
        memory=Memory(int(held * MIB), 0),
        gradients="equal",
    )


PEERS = [
    row("titan", "selective", 1.15, 126.3),
    row("model", "selective", 1.10, 142.6),
    row("titan", "full", 1.3, 38.3),
]


def goals(*ours: Row) -> list[Goal]:
    return selective_goals([*PEERS, *ours], ("titan", "model"))


def test_ours_counts_only_within_a_peers_bytes_and_against_the_best_peer():
    small = row("ours", "selective", 1.09, 120, name="small")
    large = row("ours", "selective", 1.06, 142.6, name="large")
    at_titan, at_model = goals(small, large)
    assert at_titan.value == pytest.approx(0.9)  # 9 % over 10 %, though titan itself has 15 %
    assert not at_titan.met
    assert "small, 0.60 of that peer's" in at_titan.what
    assert at_model.value == pytest.approx(0.6)
    assert at_model.met
    assert "large" in at_model.what


def test_a_goal_that_nothing_of_ours_fits_is_missed():
    at_titan, at_model = goals(row("ours", "selective", 1.0, 130))
    assert at_titan.value is None
    assert not at_titan.met
    assert at_model.value == pytest.approx(0.0)


def test_no_selective_of_ours_no_goal():
    assert goals(row("ours", "full", 1.2, 38.3)) == []


def test_full_is_paired_with_hugging_face_in_the_same_rounds():
    rows = [row("ours", "full", 1.25, 1), row("Hugging Face", "full", 1.25, 1)]
    seconds = {"ours full": [1.0, 4.04, 1.03], "Hugging Face full": [1.0, 4.0, 1.0]}
    (goal,) = full_goals(rows, seconds)
    assert goal.value == pytest.approx(1.01)
    assert goal.met
    assert full_goals(rows[:1], seconds)[0].met is False


def test_host_overhead_is_that_over_none_per_block():
    rows = [
        row("ours", "full", 2, 1, per_block=1.3),
        row("ours", "selective", 2, 1, per_block=2.1),
        row("titan", "selective", 4, 1, per_block=3.0),
    ]
    full, selective = host_goals(rows, ("titan",))
    assert (full.met, selective.met) == (True, False)
    assert selective.value == pytest.approx(0.7)
