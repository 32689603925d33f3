import json
from dataclasses import replace

from tools.bench_moe.records import COMBINE, NONE, Work
from tools.bench_moe.results import Alone, Ratio, Result, Row
from tools.bench_moe.settings import SHAPES, Settings
from tools.bench_moe.show import as_data, page

MACHINE = {"device": "a CPU", "torch": "2.13.0", "cpus": 2, "load": {"before": 1.25, "after": 3.0}}
IDLE = Work({"alltoall_base_": 60}, 10**9, 0, 0, 0, 0, 0, 0, 0, (), True)
KEPT = replace(IDLE, stored=6, kept_bytes=6 * 2**20, pinned_bytes=48 * 1024, only_memory=("layers.0", "layers.1"))


def result(kept: Work, cpu: bool = True) -> Result:
    none, combine = Ratio(1, 0, 1, 1.0), Ratio(0.95, 0.01, 0.94, 0.96)
    rows = [
        Row(NONE, 500.0, none, none if cpu else None, IDLE),
        Row(COMBINE, 480.0, combine, combine if cpu else None, kept),
    ]
    return Result("hybridep", "plain sum", rows, Alone(2.0, 4.0, 8 * 10**8))


def test_a_table_has_what_was_measured_beside_what_was_predicted():
    shown = page(Settings(shape=SHAPES["cpu"]), MACHINE, [result(replace(KEPT, served=6, only_memory=()))])
    lines = shown.splitlines()
    (combine,) = (line for line in lines if line.startswith("| combine"))
    ratios = "0.950 | 0.010 | 0.940 | 0.960"
    assert combine == f"| combine | 480.0 | {ratios} | {ratios} | 6 of 6 | 60 | 0 | 0 | 6144 | 48 | equal |"
    tables = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in tables}) == 1
    assert "(800 MFLOP at 200 GFLOP/s)" in shown
    assert "load average of 2 CPUs: before 1.2; after 3.0" in shown
    assert "(reference buffer), `x + moe(norm(x))`" in shown
    assert "only_memory" not in shown
    assert "One rank" not in shown


def test_what_was_kept_for_nothing_and_gradients_that_differ_are_told():
    shown = page(Settings(shape=SHAPES["cpu"]), MACHINE, [result(replace(KEPT, gradients_equal=False))])
    assert "`ac_moe.stats().only_memory` under combine: layers.0, layers.1." in shown
    assert shown.count("DIFFERENT") == 1


def test_one_gpu_says_what_it_measures_and_has_no_cpu_seconds():
    settings = Settings(shape=SHAPES["cuda"], device="cuda", dtype="bfloat16", ranks=1)
    shown = page(settings, MACHINE, [result(KEPT, cpu=False)])
    assert "One rank: nothing leaves the device." in shown
    assert "CPU x none" not in shown
    assert len({line.count("|") for line in shown.splitlines() if line.startswith("|")}) == 1


def test_the_object_for_programs_is_plain_data():
    data = json.loads(json.dumps(as_data(Settings(shape=SHAPES["cpu"]), MACHINE, [result(KEPT)])))
    (case,) = data["cases"]
    assert case["rows"][1]["wall"] == {"measured": 0.95, "spread": 0.01, "best": 0.94, "predicted": 0.96}
    assert case["projection_rate"] == 2e11
