import json

import pytest

from tools.bench_loss import __main__ as bench
from tools.bench_loss.contestants import GEMMS, PLAIN

TINY = {"tokens": 64, "width": 16, "vocab": 512}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ("TIMED", "LARGE", "LONG"):
        monkeypatch.setattr(bench, shape, TINY)


@pytest.mark.usefixtures("tiny")
def test_every_table_has_ours_beside_plain(capsys: pytest.CaptureFixture[str]):
    bench.main(["--rounds", "1", "--only", "ours*", "--json"])
    tables = json.loads(capsys.readouterr().out)
    assert list(tables) == [
        "time, fp32",
        "time, fp32, half of the labels ignored",
        "memory, fp32",
        "time, bf16",
        "time, bf16, half of the labels ignored",
        "memory, bf16",
        "weight gradient in bf16, 256 chunks",
    ]
    assert [row["name"] for row in tables["time, fp32"]] == [PLAIN, GEMMS, "ours", "ours, recompute"]
    assert [row["name"] for row in tables["memory, bf16"]] == [
        PLAIN, "ours", "ours, accum param", "ours, bf16 products", "ours, recompute",
    ]  # fmt: skip
    assert tables["memory, fp32"][1]["to_plain"] < 1


@pytest.mark.usefixtures("tiny")
def test_a_peer_that_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]):
    bench.main(["accuracy", "--only", "torchtune*"])
    assert "| torchtune, 8 chunks | not installed: " in capsys.readouterr().out
