"""The command as a user runs it, on two ranks, and what it says of a tiny model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.bench_moe import __main__ as bench
from tools.bench_moe.records import CHECKPOINT, COMBINE, NONE, OFF, TAIL, VARIANTS
from tools.bench_moe.settings import Shape

SHAPE = Shape(tokens=8, hidden=16, intermediate=12, experts=4, top_k=2, layers=1, microbatches=2)
ROOT = Path(__file__).parents[3]
CALLS = SHAPE.layers * SHAPE.microbatches
RANKS = 2
GATED, SUM = "gated", "plain sum"
"""The first needs the output of its combine in the backward, the second does not."""

Work = Callable[[str, str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    sizes = [f"--{name}={size}" for name, size in vars(SHAPE).items()]
    command = [sys.executable, "-m", "tools.bench_moe", "--rounds=5", "--timeout=240", "--json"]
    command += [argument.replace("top_k", "top-k") for argument in sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "hybridep, plain sum: round 5 of 5" in done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def work(told: dict[str, Any]) -> Work:
    """What a step did, by dispatcher, form and variant."""
    cases = {(case["dispatcher"], case["form"]): case["rows"] for case in told["cases"]}
    found = {(*case, row["variant"]): row["work"] for case, rows in cases.items() for row in rows}
    return lambda *key: found[key]


@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep"])
def test_exactly_what_each_mode_skips_is_counted(work: Work, dispatcher: str):
    each = {"alltoall": {"alltoall_base_": 1}, "hybridep": {"alltoall_base_": 1, "barrier": 1}}[dispatcher]
    none = work(dispatcher, GATED, NONE)
    for mode, gemms in ((COMBINE, 0), (TAIL, CALLS)):
        did = work(dispatcher, GATED, mode)
        assert (did["stored"], did["served"], did["gemms_skipped"]) == (CALLS, CALLS, gemms)
        assert did["collectives_skipped"] == CALLS * sum(each.values())
        fewer = {name: calls - did["collectives"].get(name, 0) for name, calls in none["collectives"].items()}
        assert {name: calls for name, calls in fewer.items() if calls} == {name: CALLS * n for name, n in each.items()}
        assert none["product_flops"] - did["product_flops"] == gemms * RANKS * SHAPE.projection_flops
        assert did["only_memory"] == []


@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep"])
def test_where_nothing_needs_the_combine_nothing_is_saved_and_stats_say_so(
    told: dict[str, Any], work: Work, dispatcher: str
):
    none = work(dispatcher, SUM, NONE)
    for mode in (COMBINE, TAIL):
        did = work(dispatcher, SUM, mode)
        assert (did["stored"], did["served"], did["collectives_skipped"], did["gemms_skipped"]) == (CALLS, 0, 0, 0)
        assert (did["collectives"], did["product_flops"]) == (none["collectives"], none["product_flops"])
        assert did["only_memory"] == ["layers.0"]
    (case,) = (case for case in told["cases"] if (case["dispatcher"], case["form"]) == (dispatcher, SUM))
    assert {row["wall"]["predicted"] for row in case["rows"]} == {None, 1.0}


def test_bytes_kept_are_one_output_per_layer_and_microbatch_in_flight(work: Work):
    for form in (GATED, SUM):
        for variant in VARIANTS:
            did = work("alltoall", form, variant)
            assert did["kept_bytes"] == (CALLS * SHAPE.tokens * SHAPE.hidden * 4 if variant in (COMBINE, TAIL) else 0)
            pinned = CALLS * SHAPE.tokens * SHAPE.top_k * 8  # the expert ids, int64
            assert did["pinned_bytes"] == (0 if variant in (OFF, CHECKPOINT) else pinned)
            assert did["left_bytes"] == 0


def test_gradients_are_equal_and_predictions_follow_from_what_was_served(told: dict[str, Any]):
    assert len(told["cases"]) == 4
    for case in told["cases"]:
        assert [row["variant"] for row in case["rows"]] == list(VARIANTS)
        assert all(row["work"]["gradients_equal"] for row in case["rows"])
        if case["form"] == GATED:
            predicted = {row["variant"]: row["cpu"]["predicted"] for row in case["rows"]}
            assert predicted[TAIL] < predicted[COMBINE] < predicted[NONE] == 1
        assert case["alone"]["projection_flops"] == SHAPE.projection_flops


@pytest.mark.parametrize(
    ("gpus", "arguments", "says"),
    [
        (0, ["--device", "cuda"], "torch sees no GPU"),
        (1, ["--device", "cuda", "--ranks", "2"], "torch sees 1 GPUs"),
        (0, ["--rounds", "4"], "rounds: 4 is less than 5"),
    ],
)
def test_bad_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: int, arguments: list[str], says: str
):
    monkeypatch.setattr(bench, "_gpus", lambda: gpus)
    with pytest.raises(SystemExit) as refused:
        bench.main(arguments)
    assert refused.value.code == 2
    assert says in capsys.readouterr().err
