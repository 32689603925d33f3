"""The table that a run begins with has a row for whatever a recipe may ask."""

import json
import re
from dataclasses import fields
from io import StringIO
from types import SimpleNamespace

import pytest
import torch

from ac_core import Report
from ac_recipes.parallel.setup import Parallel
from ac_recipes.recipe import Recipe
from ac_recipes.tables import table_text
from ac_recipes.training.batches import BatchPlan
from ac_recipes.training.console import RunConsole
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.settings import settings_table
from ac_recipes.training.trainer import train

ROWS = {
    "model": ("model", "attention"),
    "distributed": ("activation checkpointing", "strategy"),
    "compile": ("compile",),
    "loss_fn": ("loss",),
    "peft": ("lora",),
    "dataset": ("records",),
    "validation_dataset": ("validation",),
    "packed_sequence": ("packed rows",),
    "tokenizer": ("vocabulary",),
    "freeze_config": ("frozen",),
    "optimizer": ("optimizer",),
    "lr_scheduler": ("learning rate",),
    "step_scheduler": ("global batch", "local batch", "steps", "validation", "checkpoints"),
    "clip_grad_norm": ("largest gradient norm",),
    "checkpoint": ("checkpoints",),
    "rng": ("seed",),
    "run": (),  # the line below the table
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""Of each section."""


@pytest.fixture
def asked(tiny, tmp_path):
    """A recipe that asks for as much as one recipe can, with overrides."""
    records = tmp_path / "records.jsonl"
    records.write_text("".join(f'{{"text": "The square of {n} is {n * n}."}}\n' for n in range(60)))
    small = (
        f"dataset={{kind: records, path_or_dataset_id: {records}, sequence_length: 32, validation_fraction: 0.2}}",
        "packed_sequence.packed_sequence_size=64",
        "compile={backend: eager, fullgraph: false, dynamic: false}",
        "clip_grad_norm.max_norm=0.5",
        "step_scheduler={max_steps: 50, num_epochs: 1, val_every_steps: null}",
        "lr_scheduler={lr_warmup_steps: auto, min_lr: 1e-4}",
        "checkpoint={keep_last: 2, keep_best: 1}",
    )
    return lambda *settings: tiny(*small, *settings)


@pytest.fixture
def rows(monkeypatch):
    """`rows(recipe)`: the rows of its run, whose steps are not made, by setting."""

    class Shown(BaseException):
        pass

    def rows(recipe):
        shown = {}

        def keep(_, table):
            shown.update({name: row for name, *row in table})
            raise Shown

        with monkeypatch.context() as patch:
            patch.setattr(RunConsole, "asked_applied", keep)
            with pytest.raises(Shown):
                train(recipe, "tiny")
        return shown

    return rows


def test_every_section_is_there(asked, rows):
    frozen = "freeze_config={freeze_vision_tower: false, freeze_embeddings: true}"
    shown = rows(asked(frozen))
    adapters = torch.nn.ModuleDict({"q_proj": torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 2, bias=False)})})
    adapters.config = SimpleNamespace(model_type="llama", _attn_implementation="sdpa")
    recipe = asked("peft={dim: 2, target_modules: [q_proj]}", "tensorboard={}", "wandb={mode: offline, project: mine}")
    table = settings_table(
        recipe,
        Parallel(adapters, Report("full", ("all",), ()), Ranks(0, 1, torch.device("cpu")), (), recipe.distributed),
        BatchPlan(1, 2, 2),
        Ranks(0, 1, torch.device("cpu")),
        SimpleNamespace(train=[0] * 9, validation=[0], tokenizer=[0] * 300, detail=""),
        SimpleNamespace(source=""),
    )
    shown |= {name: row for name, *row in table if name in ("lora", "tensorboard", "wandb")}
    assert ROWS.keys() == {field.name for field in fields(Recipe)}, "a section without a row"
    assert {name for names in ROWS.values() for name in names} - shown.keys() == set()
    assert shown["lora"] == [*["dim 2, alpha 32"] * 2, "1 layer (q_proj), dropout 0; no more is trained"]
    assert shown["wandb"] == ["offline", "offline", "mine"]


def test_what_is_applied_may_differ_from_what_was_asked(asked, rows):
    shown = rows(asked("step_scheduler.local_batch_size=4", "lr_scheduler.lr_decay_style=constant"))
    steps = int(shown["steps"][1])
    assert shown["steps"] == ["50", str(steps), "num_epochs 1 ends it"]
    assert steps < 50
    assert shown["learning rate"][2] == f"0.005 after a warm-up of {steps // 10} steps"
    assert shown["packed rows"][:2] == ["64 tokens", "64 tokens"]
    assert shown["compile"] == ["eager, not dynamic", "eager, not dynamic", "2 blocks, one by one"]
    assert shown["validation"] == ["0.2 of it", shown["validation"][1], "after the last step"]
    assert shown["checkpoints"] == ["every 2 steps"] * 2 + ["the newest 2 are kept, and the best 1"]
    assert shown["largest gradient norm"][1] == "0.5"


def test_a_run_that_ends_within_its_warm_up_says_so(asked, rows):
    shown = rows(asked("step_scheduler.num_epochs=null", "lr_scheduler.lr_warmup_steps=200"))
    assert shown["learning rate"][2] == "the run ends within its warm-up of 200 steps, at 0.00125"


def test_what_has_no_effect_or_another_than_expected_is_said(asked, rows):
    shown = rows(asked("dataset.validation_fraction=0", "step_scheduler.val_every_steps=3", "checkpoint={}"))
    assert shown["validation"] == ["0 of it", "off", "no data is held out; val_every_steps 3 has no effect"]


def test_a_long_path_is_shown_by_its_end(asked, rows, tmp_path):
    assert rows(asked())["records"][:2] == ["records.jsonl"] * 2
    files = f"dataset.path_or_dataset_id=[{tmp_path}/records.jsonl, {tmp_path}/records.jsonl]"
    assert rows(asked(files))["records"][:2] == ["2 sources"] * 2


def test_a_long_list_of_what_a_plan_keeps_is_wrapped_between_names(asked, rows):
    names = [f"self_attn.{each}_proj" for each in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj", "attention"]
    plan = json.dumps({"model.layers.0": names, "model.layers.1": "none"})
    made_for = "{memory_budget: 1GiB, local_batch_size: 4, row_length: 64, ranks: 1}"
    budget = f"{{policy: budget, memory_budget: 1GiB, plan: {plan}, planned_for: {made_for}}}"
    shown = rows(asked(f"distributed.activation_checkpointing={budget}", "compile=false"))
    known = "the plan is for 4 x 64 tokens a rank, on 1 rank"
    assert shown["  memory budget"] == ["1GiB", "1GiB", f"{known}; here 2 x 64 tokens on 1"]
    _, applied, detail = shown["  model.layers.0"]
    assert detail.startswith("1 block, language, found by ")
    assert max(map(len, applied.split())) <= len("self_attn.{q_proj,")  # a line may end after each
    table = table_text(("setting", "asked", "applied", "detail"), [("row", applied, applied, detail * 3)], StringIO())
    for name in re.findall(r"\w+_proj", " ".join(names)):
        assert len(re.findall(rf"\b{name}\b", table)) == 2
