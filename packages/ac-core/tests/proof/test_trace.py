import logging
import os
import subprocess
import sys

import pytest

import ac_core


@pytest.fixture
def traced(decoder_like, train_step):
    def run(policy, steps=3):
        model = decoder_like()
        ac_core.apply_activation_checkpointing(model, policy)
        for _ in range(steps - 1):
            train_step(model)
        with ac_core.trace_decisions() as trace:
            train_step(model)
        return trace

    return run


@pytest.fixture
def decoder_like(stack):
    return lambda: stack(depth=3)


def test_full_recomputes_everything_that_is_needed(traced):
    trace = traced("full")
    ended = {op for op, decision in trace.decisions.items() if decision == "NEITHER"}
    assert ended == {"aten::add", "aten::mul"}
    assert {trace.decisions[op] for op in trace.decisions.keys() - ended} == {"RECOMPUTE"}
    last = trace.ops[-1]
    assert (last.layer, last.op, last.decision) == ("", "aten::add", "NEITHER")  # the residual: nothing of it is saved
    assert "the recompute ends before it" in last.reason
    assert {op.decision for op in trace.ops if op.layer == "up"} == {"RECOMPUTE"}
    (row,) = [line for line in str(trace).splitlines() if "aten::add " in line]
    assert row.startswith("NEITHER")
    count = sum(op.op == "aten::add" for op in trace.ops)
    assert f"{count} calls: 0 saved, 0 recomputed, {count} neither" in row


def test_selective_says_which_calls_are_saved(traced):
    trace = traced("selective")
    assert trace.decisions["aten::addmm"] == "ALTERNATE"  # `down` saves twice as many FLOPs a byte as `up`
    assert trace.decisions["aten::gelu"] == "RECOMPUTE"
    kept = next(op for op in trace.ops if op.decision == "SAVE")
    assert (kept.block, kept.layer, kept.op, kept.shape) == ("layers.0", "down", "aten::addmm", (24, 16))
    assert (kept.nbytes, kept.flops) == (24 * 16 * 4, 2 * 24 * 16 * 32)
    assert kept.reason == "in the kept call down.forward"


def test_to_dict_and_the_table(traced):
    trace = traced("selective")
    data = trace.to_dict()
    assert data["decisions"] == trace.decisions
    assert len(data["ops"]) == len(trace.ops)
    assert "ALTERNATE  aten::addmm" in str(trace)


def test_nothing_is_watched_afterwards(traced):
    from ac_core.region.watch import watched

    trace = traced("full")
    assert trace.ops
    assert not watched()


def test_each_unique_op_is_logged_once(traced, caplog):
    caplog.set_level(logging.INFO, "ac_core.trace")
    trace = traced("selective")
    assert sorted(caplog.messages) == sorted(f"{decision} {op}" for op, decision in trace.decisions.items())


def test_the_environment_switch(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, ac_core\n"
        "model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3,\n"
        "                                    enable_nested_tensor=False)\n"
        "ac_core.apply_activation_checkpointing(model, 'selective')\n"
        "for _ in range(2):\n"
        "    model(torch.randn(2, 4, 16)).sum().backward()\n"
    )
    environment = os.environ | {"NEMO_SELECTIVE_AC_TRACE": "1"}
    command = [sys.executable, str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if line.split(" ")[0] in ("SAVE", "RECOMPUTE", "ALTERNATE")]
    assert any("scaled_dot_product" in line and line.startswith("SAVE") for line in lines)
    assert len(lines) == len(set(lines)) == len({line.split()[1] for line in lines})
