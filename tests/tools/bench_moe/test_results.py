from dataclasses import replace

import pytest

from tools.bench_moe.records import COMBINE, NONE, OFF, ONE_COMBINE, ONE_PROJECTION, TAIL, Measured, Sample, Work
from tools.bench_moe.results import evaluate
from tools.bench_moe.settings import SHAPES, Settings

SETTINGS = Settings(shape=SHAPES["cpu"])
IDLE = Work(
    collectives={"alltoall_base_": 4},
    product_flops=100,
    stored=0,
    served=0,
    collectives_skipped=0,
    gemms_skipped=0,
    kept_bytes=0,
    pinned_bytes=0,
    left_bytes=0,
    only_memory=(),
    gradients_equal=True,
)
WORK = {
    OFF: IDLE,
    NONE: IDLE,
    COMBINE: replace(IDLE, stored=2, served=2, collectives_skipped=2),
    TAIL: replace(IDLE, stored=2, served=2, collectives_skipped=2, gemms_skipped=2),
}
# The machine is twice as slow in the third round: what is paired by round does not notice.
STEPS = {OFF: 0.75, NONE: 1.0, COMBINE: 0.875, TAIL: 0.75, ONE_COMBINE: 0.0625, ONE_PROJECTION: 0.03125}
SPEED = (1, 1, 2, 1, 1)


def measured(wall: float = 1, cpu: float = 1, **changed: object) -> Measured:
    samples = {name: [Sample(wall * step * slow, cpu * step * slow) for slow in SPEED] for name, step in STEPS.items()}
    work = {variant: replace(one, **changed) for variant, one in WORK.items()}
    return Measured("alltoall", "gated", work, samples)


def test_ratios_and_predictions_are_paired_with_none():
    rows = {row.variant: row for row in evaluate(SETTINGS, [measured(), measured()]).rows}
    for basis in ("wall", "cpu"):
        ratios = {variant: getattr(row, basis) for variant, row in rows.items()}
        assert {variant: ratio.measured for variant, ratio in ratios.items()} == {
            OFF: 0.75,
            NONE: 1.0,
            COMBINE: 0.875,
            TAIL: 0.75,
        }
        assert {ratio.spread for ratio in ratios.values()} == {0}
        assert {variant: ratio.predicted for variant, ratio in ratios.items()} == {
            OFF: None,
            NONE: 1.0,
            COMBINE: 1 - 2 * 0.0625,
            TAIL: 1 - 2 * 0.0625 - 2 * 0.03125,
        }


def test_what_is_never_served_saves_nothing():
    rows = {row.variant: row for row in evaluate(SETTINGS, [measured(served=0, gemms_skipped=0)]).rows}
    assert rows[COMBINE].wall.predicted == rows[TAIL].cpu.predicted == 1


def test_the_slowest_rank_makes_the_step_and_all_ranks_the_cpu_seconds():
    quick, slow = measured(wall=1, cpu=1), measured(wall=3, cpu=2)
    result = evaluate(SETTINGS, [quick, slow])
    none = {row.variant: row for row in result.rows}[NONE]
    assert none.milliseconds == 3000
    assert result.alone.combine_milliseconds == 3 * 62.5
    assert result.alone.projection_rate == pytest.approx(SETTINGS.shape.projection_flops / (3 * 0.03125))
    assert none.work.product_flops == 200
    # On the CPU basis a mode that costs the second rank less shows by the share of that rank in the sum.
    slow.samples[TAIL][:] = [Sample(one.wall, one.cpu * 0.5) for one in slow.samples[TAIL]]
    tail = {row.variant: row for row in evaluate(SETTINGS, [quick, slow]).rows}[TAIL]
    assert tail.cpu.measured == pytest.approx((0.75 + 2 * 0.375) / 3)


def test_gradients_are_equal_if_they_are_on_every_rank():
    row = evaluate(SETTINGS, [measured(), measured(gradients_equal=False)]).rows[0]
    assert not row.work.gradients_equal


def test_on_a_gpu_there_are_no_cpu_seconds():
    gpu = Settings(shape=SHAPES["cuda"], device="cuda", dtype="bfloat16", ranks=1)
    assert {row.cpu for row in evaluate(gpu, [measured()]).rows} == {None}
