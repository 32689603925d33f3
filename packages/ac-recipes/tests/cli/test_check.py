"""What users of other tools got wrong in recipes, and what those tools did not tell them."""

from dataclasses import fields, is_dataclass, replace
from typing import get_args, get_type_hints

import pytest

from ac_recipes.cli import main
from ac_recipes.load import load_recipe
from ac_recipes.reader import fields_of, read_recipe, split_overrides, to_plain
from ac_recipes.recipe import Recipe
from ac_recipes.trackers.config import TensorBoardConfig

CHECKPOINTING = "distributed.activation_checkpointing"


def told(capsys, *arguments):
    """The lines of `check default` with these overrides."""
    code = main(["check", "default", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.err) == (2, "")
    return captured.out.splitlines()


def distributed(*arguments):
    rest, overrides = split_overrides(arguments)
    assert rest == []
    return load_recipe("default", overrides, quick=True).distributed


def test_a_misspelt_policy_shows_what_is_valid_and_what_was_meant(capsys, tiny_file):
    tiny_file.write_text(tiny_file.read_text().replace("checkpointing: true", "checkpointing: selctive"))
    assert main(["check", str(tiny_file)]) == 2
    assert capsys.readouterr().out == (
        f"{tiny_file}:10:29: {CHECKPOINTING}: expected true, false, null, one of 'none', 'full', 'selective', "
        "'budget', or a mapping; got 'selctive'; did you mean 'selective'?\n"
    )


def _fields():
    """Every field of every section, `(section, field)`, as the recipe `default` has them, or of its first kind."""
    recipe = load_recipe("default", quick=True)
    for section, kind in get_type_hints(Recipe).items():
        value = getattr(recipe, section)
        classes = [type(value)] if is_dataclass(value) else [*filter(is_dataclass, (kind, *get_args(kind)))][:1]
        for cls in classes:
            yield from ((section, field.name) for field in fields(cls))


@pytest.mark.parametrize(("section", "name"), sorted(set(_fields())), ids=lambda part: part)
def test_an_unknown_key_of_any_section_is_refused_with_the_nearest(capsys, tmp_path, section, name):
    wrong = f"{name}q"
    (line,) = [line for line in told(capsys, f"--{section}.{wrong}", "1") if f"{section}.{wrong}: " in line]
    assert line.startswith(f"command line:1:15: {section}.{wrong}: unknown field")
    assert "did you mean '" in line or "belongs " in line
    path = tmp_path / "r.yaml"
    path.write_text(f"{section}:\n  {wrong}: 1\n")
    assert main(["check", str(path)]) == 2
    assert f"{path}:2:3: {section}.{wrong}: unknown field" in capsys.readouterr().out


def test_an_unknown_key_deep_in_a_section(capsys):
    (line,) = told(capsys, f"--{CHECKPOINTING}", "{policy: budget, memory_bugdet: 1GiB}")
    assert line.endswith(f"{CHECKPOINTING}.memory_bugdet: unknown field; did you mean 'memory_budget'?")


def test_megatron_fsdp_refuses_selective_and_names_who_does_not(capsys):
    (line,) = told(capsys, "--distributed.strategy", "megatron_fsdp", f"--{CHECKPOINTING}", "selective")
    assert f"{CHECKPOINTING}: 'selective' is not supported" in line
    assert "'fsdp2' or 'ddp'" in line


@pytest.mark.parametrize(
    ("policy", "texts"),
    [
        ("full", ["true", "full", '"full"', "'full'", "on", "True", "{policy: full}", "{policy: true}"]),
        ("none", ["false", "null", "off", "none", "~", "no", "{policy: false}"]),
    ],
)
def test_one_thing_said_in_many_ways(policy, texts):
    for text in texts:
        assert distributed(f"--{CHECKPOINTING}={text}").checkpointing.policy == policy
        assert distributed(f"--{CHECKPOINTING}", text).checkpointing.policy == policy


def test_a_nested_mapping_is_an_option_like_any_other():
    mapping = "{policy: selective, save: [attention, mlp.up_proj], layers: {language: 0-2}}"
    whole = distributed(f"--{CHECKPOINTING}", mapping)
    parts = distributed(
        f"--{CHECKPOINTING}={{policy: selective}}",
        f"--{CHECKPOINTING}.save",
        "[attention, mlp.up_proj]",
        f"--{CHECKPOINTING}.layers.language=0-2",
    )
    assert whole == parts
    assert whole.checkpointing.save == ("attention", "mlp.up_proj")
    assert whole.checkpointing.layers == {"language": "0-2"}


def test_a_section_is_an_option_like_any_field():
    _, overrides = split_overrides(
        [
            "--dataset={kind: records, path_or_dataset_id: rajpurkar/squad}",
            *("--optimizer", "{lr: 1e-3}", "--compile", "true", "--tensorboard", "{}"),
            "--step_scheduler={max_steps: 9, val_every_steps: null}",
        ],
        fields_of(Recipe),
    )
    before, recipe = load_recipe("default", quick=True), load_recipe("default", overrides, quick=True)
    assert (recipe.dataset.kind, recipe.dataset.path_or_dataset_id) == ("records", "rajpurkar/squad")
    assert recipe.dataset.sequence_length == before.dataset.sequence_length == 256
    assert recipe.optimizer.lr == 1e-3
    assert recipe.step_scheduler == replace(before.step_scheduler, max_steps=9, val_every_steps=None)
    assert (recipe.compile, recipe.tensorboard) == (True, TensorBoardConfig())
    assert recipe.distributed == before.distributed


@pytest.mark.parametrize("budget", ["-0.1", "nan", ".nan", "inf", "0", "1.5", "'nan'", "20", "24gib", "true", "[1]"])
def test_a_budget_out_of_range_is_refused_at_its_place(capsys, budget):
    (line,) = told(capsys, f"--{CHECKPOINTING}", f"{{policy: budget, memory_budget: {budget}}}")
    assert line.startswith(f"command line:1:15: {CHECKPOINTING}.memory_budget: ")
    assert budget.strip("'[]") in line or budget == "[1]"


@pytest.mark.parametrize("budget", ['"20GB"', '"24GiB"', "24GiB", "0.5", "50%", "device", "30000000000"])
def test_a_budget_in_any_unit_is_kept_as_written(budget):
    config = distributed(f"--{CHECKPOINTING}", f"{{policy: budget, memory_budget: {budget}}}")
    written = to_plain(config)["activation_checkpointing"]["memory_budget"]
    assert str(written) == budget.strip('"')


def test_what_is_off_stays_off(tmp_path):
    assert to_plain(distributed(f"--{CHECKPOINTING}=off"))["activation_checkpointing"] == "none"
    text = "model: {config: {model_type: llama}}\ndistributed: {activation_checkpointing: off}"
    assert read_recipe(Recipe, "r.yaml", text=text).distributed.checkpointing.policy == "none"
