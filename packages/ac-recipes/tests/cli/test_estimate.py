"""`estimate`: one row a policy, and nothing is trained."""

import json
import re

import pytest

from ac_core import Estimate


def test_one_row_a_policy_what_was_assumed_and_a_picture_of_the_recipes_own(run, tiny_file, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Estimate, "save_timeline", lambda self, path: drawn.append((self.setting, path)), raising=False)
    path = str(tmp_path / "timeline.svg")
    code, out, _ = run("estimate", str(tiny_file), "--picture", path)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[3:7]] == ["policy", "none", "full", "selective"]
    assert out.splitlines()[3].endswith("run again (of forward)")
    (full,) = re.findall(r"^full \* .*\((.*)%\)$", out, re.MULTILINE)
    assert 50 < float(full) < 100  # all of the blocks but their ends, and not the head
    for line in out.splitlines()[4:7]:
        peak, *parts = map(float, re.findall(r"([\d.]+) \([\d.]+\)", line.partition("FLOP")[0]))
        assert len(parts) == 6
        assert sum(parts) == pytest.approx(peak, abs=0.01 * len(parts))
    assert "2 x 16 tokens a rank, float32, one process, fused loss, adamw, cuda with plain kernels" in out
    assert "one rank, in MiB (MB)" in out
    assert "* full is the recipe's policy" in out
    assert "assumed:\n" in out
    assert out.splitlines()[-1] == f"picture: {path}"
    ((setting, drawn_to),) = drawn
    assert setting.startswith("policy full")
    assert drawn_to == path


def test_as_json(run, tiny_file):
    arguments = ["--json", "--kernels", "fused", "--distributed.dp_size=2", "--compile=true"]
    code, out, _ = run("estimate", str(tiny_file), *arguments)
    assert code == 0
    result = json.loads(out)
    assert set(result) == {"assumptions", "policies", "dominant"}
    assert set(result["policies"]) == {"none", "full", "selective"}
    none, full = result["policies"]["none"], result["policies"]["full"]
    assert set(none) == {
        "peak_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "loss_bytes",
        "recompute_flops", "at_peak",
    }  # fmt: skip
    assert full["activation_bytes"] < none["activation_bytes"]
    assert sum(none["at_peak"].values()) == none["peak_bytes"]
    assert none["recompute_flops"] == 0 < full["recompute_flops"]
    assert any("fused kernels" in said for said in result["assumptions"])
    assert any("FSDP2" in said for said in result["assumptions"])
    assert any(said.startswith("compile: the recipe compiles its blocks") for said in result["assumptions"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "24gib"], "--budget: '24gib' has no unit of memory: "),
        (["--budget", "24"], "--budget: 24 would be bytes, too few for any model; give a unit: '24GiB'"),
        (["--budget", "1.5"], "--budget: 1.5 is no fraction above 0 and up to 1"),
        (["--kernels", "fast"], "argument --kernels: invalid choice: 'fast'"),
        (["--picture", "x.gif"], "--picture: 'x.gif' ends in none of .svg, .html, .png"),
        (["--picture", "/nowhere/x.svg"], "--picture: there is no folder /nowhere"),
        (["--distributed.dp_size", "3"], "4 sequences cannot be shared evenly by 3 ranks"),
        (["--policy", "full"], "unknown argument '--policy'"),
    ],
)
def test_a_mistake_is_one_line_before_any_work(run, tiny_file, arguments, message):
    code, out, err = run("estimate", str(tiny_file), *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert [line for line in err.splitlines() if not line.startswith("estimate: ")][1:] == []


def test_experts_shared_over_ranks(run):
    """The shipped recipe of a mixture of experts, which says nothing of `dp_size`."""
    code, out, err = run("estimate", "qwen3-moe", "--model.config.num_hidden_layers", "1", "--json")
    assert code == 0, err
    assert json.loads(out)["policies"]["none"]["peak_bytes"] > 0
