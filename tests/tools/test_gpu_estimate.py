"""The script for a GPU, run whole on the CPU."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from tools import gpu_estimate
from tools.gpu_estimate import ROWS, Subject, line, main, measured_row, row_in_a_process

BOTH = "checkpointing and fused loss"
SAMPLE = ("selective", "plan for 50 % and fused loss", "FSDP2 of one rank, checkpointing and fused loss")


@pytest.fixture(scope="module")
def small():
    return Subject.of(small=True)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_predicted_and_run(small, name):
    row = measured_row(ROWS[name], small)
    assert abs(row["difference"]) < 0.03
    assert row["predicted_moment"]
    assert row["step_seconds"] > 0


def test_the_script_writes_one_json_with_a_row_for_each_process(tmp_path, capsys):
    out = tmp_path / "out.json"
    main(["--small", "--only", BOTH, "--out", str(out)])
    told = json.loads(out.read_text())
    assert told["machine"]["torch"] == torch.__version__
    assert list(told["rows"]) == [BOTH]
    row = told["rows"][BOTH]
    assert row["predicted_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.03)
    assert "1 of 1 rows within 5%, 0 not measured" in capsys.readouterr().out


def test_a_row_that_does_not_fit_is_a_row(small, monkeypatch):
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    monkeypatch.setattr(gpu_estimate, "_trained", no_room)
    row = measured_row(ROWS[BOTH], small)
    assert row["predicted_peak_bytes"] > 0
    assert line(BOTH, row).endswith("does not fit: CUDA out of memory")


def test_a_row_that_dies_or_hangs_is_a_row():
    assert "invalid choice" in row_in_a_process("no such row", small=True, limit=120)["failed"]
    assert row_in_a_process(BOTH, small=True, limit=0.01) == {"failed": "no result within 0.01 s"}


def test_without_a_gpu_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "out.json")])
    assert "no GPU here; --small" in capsys.readouterr().err
