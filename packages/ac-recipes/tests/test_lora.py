"""LoRA trains the adapters and nothing else, with checkpointing bit for bit."""

import json

import pytest
import torch

from ac_recipes.data.tokenizer import read_tokenizer
from ac_recipes.errors import UsageError
from ac_recipes.lora import PeftConfig, add_lora
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.loop import Loop
from ac_recipes.training.model import build_model
from ac_recipes.training.trainer import train


def losses(result):
    lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_without_the_library_it_is_one_line(tiny, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UsageError, match=r"^peft: LoRA needs the peft library; .*pip install .*ac-recipes\[peft\]'$"):
        train(tiny("peft.dim=2"), "tiny")


def test_only_adapters_change(tiny, monkeypatch):
    pytest.importorskip("peft")
    seen = {}
    run = Loop.run

    def watch(self):
        before = {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}
        result = run(self)
        after = dict(self.trainer.model.named_parameters())
        seen.update({name: not torch.equal(before[name], after[name]) for name in before})
        return result

    monkeypatch.setattr(Loop, "run", watch)
    train(tiny("peft.dim=2", "peft.dropout=0.1"), "tiny")
    changed = {name for name, has_changed in seen.items() if has_changed}
    assert changed == {name for name in seen if "lora_" in name}
    assert len(changed) == 2 * 7 * 2, "two matrices for each of 7 linear layers of 2 blocks"


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_checkpointing_changes_no_bit_although_the_first_input_needs_no_gradient(tiny, policy):
    pytest.importorskip("peft")
    lora = ("peft.dim=2", "peft.dropout=0.1")
    on = train(tiny(*lora, f"distributed.activation_checkpointing={policy}"), "tiny")
    off = train(tiny(*lora, "distributed.activation_checkpointing=false"), "tiny")
    assert losses(on) == losses(off)
    assert losses(on)[-1] < losses(on)[0]
    assert whole_checkpoints(on.run / "checkpoints")


def test_adapters_are_drawn_from_the_seed_in_the_dtype_of_the_model(tiny):
    pytest.importorskip("peft")
    recipe = tiny("model.dtype=bfloat16")

    def adapters(seed):
        model = build_model(recipe.model, 300, 0, torch.device("cpu"))
        add_lora(model, PeftConfig(dim=2), seed)
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    first, again, other = adapters(1), adapters(1), adapters(2)
    assert {p.dtype for p in first.values()} == {torch.bfloat16}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_peft_reads_the_adapters_that_a_run_leaves(tiny, monkeypatch):
    peft = pytest.importorskip("peft")
    outputs = {}
    ids = torch.tensor([[5, 6, 7, 8]])
    run = Loop.run

    def watch(self):
        result = run(self)
        outputs["trained"] = self.trainer.model.eval()(input_ids=ids, use_cache=False).logits
        return result

    monkeypatch.setattr(Loop, "run", watch)
    recipe = tiny("peft.dim=2")
    result = train(recipe, "tiny")
    vocabulary = len(read_tokenizer(result.run))
    model = build_model(recipe.model, vocabulary, recipe.rng.seed, torch.device("cpu"))
    base = model(input_ids=ids, use_cache=False).logits
    loaded = peft.PeftModel.from_pretrained(model, result.run / "adapter").eval()
    assert torch.equal(loaded(input_ids=ids, use_cache=False).logits, outputs["trained"])
    assert not torch.equal(base, outputs["trained"])


def test_modules_that_are_not_there_are_refused(tiny):
    pytest.importorskip("peft")
    with pytest.raises(UsageError, match=r"^peft: Target modules .*nothing.* not found"):
        train(tiny("peft.target_modules=[nothing]"), "tiny")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, "dim: 0 is below 1"),
        ({"dropout": 1.0}, r"dropout: 1\.0 is not in \[0, 1\)"),
        ({"target_modules": "q_proj"}, "target_modules: 'q_proj' is neither 'all-linear' nor a list of names"),
        ({"target_modules": ()}, "target_modules: the list of names is empty"),
    ],
)
def test_values_that_cannot_train(fields, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        PeftConfig(**fields)
