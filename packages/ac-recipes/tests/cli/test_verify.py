"""`verify`: equal is exit code 0, different is 1, and which."""

import json

import torch
from torch import nn

from ac_recipes.analysis import verifying


def test_equal(run, tiny_file):
    code, out, err = run("verify", str(tiny_file))
    assert code == 0
    assert "six steps of the model" in err
    assert out.splitlines()[0] == "activation checkpointing on against off, 2 x 16 tokens, cpu, not compiled"
    assert "compile:" not in out
    assert "asked full (scope all) -> applied to 2 of 2 blocks" in out
    assert any(line.split() == ["gradients", "21", "equal,", "bit", "for", "bit"] for line in out.splitlines())
    assert out.splitlines()[-1] == "equal"


def test_that_it_does_not_compile_is_told_where_the_recipe_does(run, tiny_file):
    code, out, _ = run("verify", str(tiny_file), "--compile", "true")
    assert code == 0
    assert "compile: the recipe compiles its blocks, and this command does not: a compiler may round otherwise" in out
    code, out, _ = run("verify", str(tiny_file), "--compile", "true", "--json")
    assert json.loads(out)["compiled"] is False


def test_different_is_told_by_parameter_and_bytes_are_counted(run, tiny_file, monkeypatch):
    build = verifying.real_subject

    class Biased(nn.Module):
        """Adds a gradient of its own only where it is run again."""

        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return x * (1.0 + 1e-3 * (type(self).calls > 4))

    def spoiled(recipe):
        subject = build(recipe)
        subject.model.model.layers[0].mlp.act_fn = Biased()
        return subject

    monkeypatch.setattr(verifying, "real_subject", spoiled)
    code, out, _ = run("verify", str(tiny_file), "--json")
    assert code == 1
    result = json.loads(out)
    assert {name: result[name] for name in ("equal", "loss", "gradients", "buffers", "rng")} == {
        "equal": False, "loss": False, "gradients": False, "buffers": True, "rng": True,
    }  # fmt: skip
    assert any("layers.0" in difference["name"] for difference in result["differences"])
    assert 0 < result["saved_bytes"]["with"] < result["saved_bytes"]["without"]
    assert torch.is_grad_enabled()


def test_checkpointing_that_is_off_is_a_mistake(run, tiny_file):
    code, out, err = run("verify", str(tiny_file), "--distributed.activation_checkpointing", "false")
    assert (code, out) == (2, "")
    assert "it is off in this recipe" in err
    assert "six steps" not in err
