"""`trace`: op by op, alike blocks together unless all is asked for."""

import json
import re

import pytest

UNITS = {"FLOP": 1, "MFLOP": 1e6}
SELECTIVE = "--distributed.activation_checkpointing=selective"


def test_blocks_that_are_alike_are_one_row(run, tiny_file):
    code, out, _ = run("trace", str(tiny_file), SELECTIVE)
    assert code == 0
    lines = out[: out.index("each op, over all layers")].splitlines()
    assert lines[0].split() == ["decision", "block", "layer", "op", "calls", "output", "bytes", "FLOPs"]
    (row,) = [line.split() for line in lines if "self_attn.q_proj" in line]
    assert row[:7] == ["SAVE", "model.layers.0-1", "(2)", "self_attn.q_proj", "aten::mm", "2", "32x32"]
    assert {line.split()[0] for line in lines[1:] if line} >= {"SAVE", "RECOMPUTE"}
    assert "compile:" not in out
    code, every, _ = run("trace", str(tiny_file), SELECTIVE, "--all", "--compile={backend: eager}")
    assert code == 0
    assert "compile: the recipe compiles its blocks, and this command does not: " in every.splitlines()[-1]
    assert sum("self_attn.q_proj" in line for line in every.splitlines()) == 2


def test_what_the_recompute_ends_before_is_not_called_recomputed_and_the_totals_add_up(run, tiny_file):
    code, out, _ = run("trace", str(tiny_file))
    assert code == 0
    words = {line.split()[3]: line.split()[0] for line in out.splitlines() if "_proj" in line}
    assert words.pop("mlp.down_proj") == "NEITHER"
    assert set(words.values()) == {"RECOMPUTE"}
    counted, work = out.splitlines()[-2:]
    calls, again, neither = map(
        int, re.match(r"(\d+) calls: 0 saved, (\d+) run again, (\d+) neither \(", counted).groups()
    )
    assert calls == again + neither
    whole, saved, run_again, ended = (float(n) * UNITS[unit] for n, unit in re.findall(r"([\d.]+) (\w?FLOP)", work))
    assert saved == 0 < ended
    assert whole == pytest.approx(run_again + ended, rel=0.01)


def test_as_json(run, tiny_file):
    code, out, _ = run("trace", str(tiny_file), "--json")
    assert code == 0
    trace = json.loads(out)
    assert trace["compiled"] is False
    assert set(trace["decisions"].values()) <= {"RECOMPUTE", "NEITHER"}
    assert {op["decision"] for op in trace["ops"] if op["layer"] == "mlp.down_proj"} == {"NEITHER"}
    assert {op["block"] for op in trace["ops"]} == {"model.layers.0", "model.layers.1"}
    product = next(op for op in trace["ops"] if op["layer"] == "self_attn.q_proj")
    assert (product["shape"], product["nbytes"], product["flops"]) == ([32, 32], 32 * 32 * 4, 2 * 32 * 32 * 32)
