"""Whatever a recipe says, `check` gives a recipe or mistakes with places; it never fails and imports nothing.

The recipes are mutated as data: keys, types, values, nesting. `tests/reader/test_fuzz.py` mutates text.
"""

import copy
import faulthandler
import random
import re
import sys
from argparse import Namespace

import pytest
import yaml

from ac_recipes.cli import check, main
from ac_recipes.reader import RecipeError, fields_of, split_overrides
from ac_recipes.recipe import Recipe
from ac_recipes.shipped import SHIPPED

CASES = 2000
AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
seed: 42
step_scheduler: {global_batch_size: 4, local_batch_size: 2, max_steps: 30, num_epochs: 1, gc_every_steps: 5}
dist_env: {backend: nccl, timeout_minutes: 1}
rng: {_target_: nemo_automodel.components.training.rng.StatefulRNG, seed: 42, ranked: true}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  torch_dtype: bf16
  config:
    _target_: transformers.models.llama.configuration_llama.LlamaConfig
    hidden_size: 64
    num_attention_heads: 4
    rope_scaling: {rope_type: default}
distributed:
  _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager
  dp_size: none
  tp_size: 1
  activation_checkpointing: selective
  activation_checkpointing_scope: [language, vision]
loss_fn: {_target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy, logit_softcapping: 30.0}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5, betas: [0.9, 0.95], weight_decay: 0}
lr_scheduler: {lr_decay_style: cosine, min_lr: 0.0}
dataloader:
  _target_: torchdata.stateful_dataloader.StatefulDataLoader
  collate_fn: {_target_: nemo_automodel.components.datasets.utils.default_collater}
  shuffle: true
compile: {enabled: false}
ci: {recipe_owner: someone}
"""
WORDS = ["true", "none", "full", "selctive", "24GiB", "1e-4", "nan", "-0.1", "${HOME}", "os.getpid", "*", "", "é", "01"]
NAMES = ["os.getpid", "builtins.exec", "antigravity", "this.s", "torch.optim.AdamW", "booby_trap.Loss", 3, None]
VALUES = [None, True, 0, -1, 1.5, 1e300, 10**30, float("nan"), [], {}, [[]], [1, {"a": [None]}], {"_target_": "x.y"}]


def dump(data):
    """The text of a recipe, by libyaml where PyYAML has it: half the time of this test goes into writing."""
    return yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, allow_unicode=True)


def mappings(data):
    """Every mapping in `data`, itself first."""
    found = [data] if isinstance(data, dict) else []
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        found += mappings(value)
    return found


def mutate(recipe, rng):
    section = rng.choice([mapping for mapping in mappings(recipe) if mapping] or [recipe])
    key = rng.choice(list(section) or ["model"])
    match rng.randrange(8):
        case 0:
            section.pop(key, None)
        case 1:
            section[key] = rng.choice(VALUES)
        case 2:
            section[key] = rng.choice(WORDS)
        case 3 if isinstance(key, str) and key:
            at = rng.randrange(len(key))
            section[key[:at] + rng.choice(["", "x", "_", "É", " "]) + key[at + 1 :]] = section.pop(key, None)
        case 4:
            section["_target_"] = rng.choice(NAMES)
        case 5:
            other = rng.choice(mappings(recipe))
            section[key] = copy.deepcopy(rng.choice([other, *other.values()]))
        case 6:
            section[rng.choice([1, True, None, "<<", "enabled", "seed", "activation_checkpointing"])] = key
        case _:
            section[key] = rng.choice([[section.get(key)], {key: section.get(key)}, str(section.get(key))])


def oddities(text, rng):
    """YAML that no dump gives: tags, anchors, aliases, second documents, other indentation."""
    odd = rng.choice(["!!python/name:os.system", "&a", "*a", "---", "<<: *a", "\t", "? ", "|", "!x", "%YAML 1.3", "}"])
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    lines[at] = rng.choice([f"{lines[at]} {odd}", f"{odd} {lines[at]}", re.sub(": .*", f": {odd}", lines[at])])
    return "\n".join(lines)


@pytest.fixture
def no_hang():
    faulthandler.dump_traceback_later(240, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def is_checked(path, overrides, capsys):
    """Whether `check` accepts it; fails on anything but a verdict with places."""
    code = check.run(Namespace(recipes=[str(path)], json=False), overrides, [])
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    if code == 0:
        line, *left_out = lines
        assert line.startswith(f"{path}: no mistake found")
        placed = re.compile(rf"  ({re.escape(str(path))}|command line):[1-9]\d*:[1-9]\d*: .")
        assert [line for line in left_out[1:] if not placed.match(line)] == []
        return True
    assert code == 2
    assert lines
    places = re.compile(rf"({re.escape(str(path))}|command line):[1-9]\d*:[1-9]\d*: .")
    assert [line for line in lines if not places.match(line)] == []
    return False


def test_mutated_recipes(tmp_path, capsys, monkeypatch, no_hang):
    (tmp_path / "booby_trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "recipe.yaml"
    recipes = [yaml.safe_load(AUTOMODEL), yaml.safe_load((SHIPPED / "default.yaml").read_text())]
    for recipe in recipes:
        path.write_text(dump(recipe), encoding="utf-8")
        assert is_checked(path, [], capsys)
    loaded, rng, valid = set(sys.modules), random.Random(0), 0
    for case in range(CASES):
        recipe = copy.deepcopy(recipes[case % 2])
        for _ in range(rng.choice([1, 1, 2, 3])):
            mutate(recipe, rng)
        text = dump(recipe)
        path.write_text(oddities(text, rng) if rng.random() < 0.2 else text, encoding="utf-8")
        valid += is_checked(path, [], capsys)
    assert set(sys.modules) == loaded
    assert CASES * 0.05 < valid < CASES * 0.5, "the mutations are too harsh, or too mild, to say anything"


def test_mutated_command_lines(tmp_path, capsys, no_hang):
    path = tmp_path / "recipe.yaml"
    rng = random.Random(1)
    fields = ["distributed.activation_checkpointing", "model.config", "loss_fn", "optimizer._target_", "x.y", "dataset"]
    for case in range(200):
        path.write_text(AUTOMODEL if case % 2 else (SHIPPED / "default.yaml").read_text())
        values = [*WORDS, *map(str, VALUES), "{a: 1", "[x]", "!!x", "{kind: records}", "{kind: []}", "{path: &a *a}"]
        argv = [f"--{rng.choice(fields)}={rng.choice(values)}" for _ in range(2)]
        try:
            _, overrides = split_overrides(argv, fields_of(Recipe))
        except RecipeError:
            continue
        is_checked(path, overrides, capsys)


def test_a_name_is_never_imported(tmp_path, capsys, monkeypatch):
    trap = tmp_path / "booby_trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        re.sub(r"_target_: [\w.]+", "_target_: booby_trap.Anything", AUTOMODEL)
        + "dataset: {_target_: 'booby_trap.py:Anything', collate_fn: booby_trap.collate}\n"
    )
    for verb in ("check", "import", "train"):
        assert main([verb, str(path)]) == 2
        out, err = capsys.readouterr()
        told = [line for line in (out + err).splitlines() if "is not a known name" in line]
        assert len(told) == 9
    assert "booby_trap" not in sys.modules
    assert not (tmp_path / "sprung").exists()
