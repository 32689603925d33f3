"""`compare`: the policies side by side, and a report that needs nothing else."""

import json
import re
from xml.etree import ElementTree

import pytest
import torch

from ac_recipes.analysis import comparing


def test_table_report_and_json(run, small_arguments, tmp_path):
    path = tmp_path / "report.html"
    arguments = ["compare", *small_arguments, "--rounds", "1", "--report", str(path)]
    code, out, err = run(*arguments, "--budget", "0.8", "--json")
    assert code == 0
    result = json.loads(out)
    policies = result["policies"]
    assert list(policies) == ["none", "full", "selective", "budget"]
    for figures in policies.values():
        assert set(figures) == {"peak_bytes", "saved_bytes", "step_seconds", "recompute_flops", "loss"}
        assert figures["loss"] == policies["none"]["loss"]
    assert policies["full"]["peak_bytes"] < policies["selective"]["peak_bytes"] < policies["none"]["peak_bytes"]
    assert policies["budget"]["peak_bytes"] <= 0.81 * policies["none"]["peak_bytes"]
    assert policies["full"]["recompute_flops"] > policies["selective"]["recompute_flops"] > 0
    assert "time, round 1 of 1" in err
    page = path.read_text()
    assert result == json.loads(re.search(r'<script type="application/json"[^>]*>(.*)</script>', page)[1]) | {
        "report": str(path)
    }
    assert re.findall(r"(?:src|href)=|url\(|@import", page) == []
    picture = ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL)[0])
    assert len(picture.findall("{http://www.w3.org/2000/svg}path")) == 4


def test_the_table_says_what_is_noise_and_by_which_rule(run, tiny_file, tmp_path):
    code, out, _ = run("compare", str(tiny_file), "--rounds", "1", "--report", str(tmp_path / "r.html"))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:6]] == ["policy", "none", "full", "selective"]
    assert out.count("too few rounds") == 2
    assert "signed-rank test" in out
    assert "not compiled, on any side" in out


def test_what_does_not_fit_is_told_and_a_loss_that_differs_is_exit_code_1(run, tiny_file, tmp_path, monkeypatch):
    counted = comparing._counted

    def spoiled(step, config, **options):
        if config.policy == "none":
            raise torch.OutOfMemoryError
        return counted(step, config, **options)

    report = ["--rounds", "1", "--report", str(tmp_path / "r.html"), "--overwrite"]
    with monkeypatch.context() as patch:
        patch.setattr(comparing, "_counted", spoiled)
        code, out, _ = run("compare", str(tiny_file), *report)
    assert code == 0
    assert re.search(r"^none +out of memory", out, re.MULTILINE)
    monkeypatch.setattr(comparing.ComparedRecipe, "loss_difference", lambda _, name: 1e-9 * (name == "full"))
    code, _, err = run("compare", str(tiny_file), *report)
    assert code == 1
    assert "the loss under full is not that without checkpointing" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds: 0 is below 1"),
        (["--report", "/nowhere/r.html"], "--report: there is no folder /nowhere"),
        (["--budget", "24gib"], "did you mean 24GiB?"),
        (["--distributed.dp_size", "2"], "this command runs on one process; add --distributed.dp_size 1"),
    ],
)
def test_a_mistake_is_one_line(run, tiny_file, arguments, message):
    code, out, err = run("compare", str(tiny_file), *arguments)
    assert (code, out) == (2, "")
    assert message in err
