"""Compiled blocks train as they do uncompiled."""

import math

import pytest
import torch

from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import train


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_the_losses_are_those_of_a_run_that_is_not_compiled(short, policy, capsys):
    settings = (f"distributed.activation_checkpointing={policy}", "dataset.validation_fraction=0")
    torch.compiler.reset()
    compiled = train(short(*settings, "compile.backend=eager"), "compiled").run  # traces as any backend does
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compile ")]
    assert "2 blocks, one by one" in row
    plain = train(short(*settings), "plain").run
    pairs = zip(RunFolder(compiled).read_metrics(), RunFolder(plain).read_metrics(), strict=True)
    assert all(math.isclose(ours["loss"], theirs["loss"], rel_tol=1e-5) for ours, theirs in pairs)
