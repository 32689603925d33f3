"""Whole recipes and all that is said about them: what a user sees."""

import textwrap

import pytest

from ac_recipes.reader import RecipeError, read_recipe, split_overrides

BROKEN = [
    (
        """\
        # Everything a hurried hand does at once.
        modle: gpt2
        seed: 0x10
        distributed:
          stratgy: ddp
          activation_checkpointing:
            mdoe: full
            scope: [language, visoin]
            early_stop: 1
        optimizer:
          lr: '1e-4'
          lr: 2
          betas: 0.9, 0.95
        layers:
        - width: 1
          name: 12
        - name: last
        policy: full
        """,
        [],
        """\
        r.yaml:2:1: modle: unknown field; did you mean 'model'?
        r.yaml:3:7: seed: expected an integer, got '0x10'; numbers are read in decimal only
        r.yaml:5:3: distributed.stratgy: unknown field for strategy 'fsdp2'; did you mean 'strategy'?
        r.yaml:7:5: distributed.activation_checkpointing.mdoe: unknown field
        r.yaml:9:17: distributed.activation_checkpointing.early_stop: expected true or false, got the number 1
        r.yaml:11:7: optimizer.lr: expected a number, got '1e-4'; remove the quotes
        r.yaml:12:3: optimizer.lr: duplicate key; first given at line 11
        r.yaml:13:10: optimizer.betas: expected a list, got '0.9, 0.95'
        r.yaml:16:9: layers[0].name: expected a string, got the number 12; quote it: '12'
        r.yaml:17:3: layers[1]: missing required field 'width'
        r.yaml:18:1: policy: unknown field; 'policy' belongs in 'distributed.activation_checkpointing'; \
did you mean 'distributed.activation_checkpointing.policy'?
        """,
    ),
    (
        """\
        model: gpt2
        distributed:
          strategy: ddp
          activation_checkpointing: selctive
        optimizer:
          _target_: os.getpid
          lr: fast
        """,
        ["--distributed.dp_size", "8", "--optimizer.name=adam", "--seed.x", "1"],
        """\
        r.yaml:4:29: distributed.activation_checkpointing: expected true, false, null, one of 'none', 'full', \
'selective', 'budget', or a mapping; got 'selctive'; did you mean 'selective'?
        r.yaml:6:13: optimizer._target_: a recipe is data and imports nothing; '_target_: os.getpid' is not a known name
        r.yaml:7:7: optimizer.lr: expected a number, got 'fast'
        command line:1:1: distributed.dp_size: unknown field for strategy 'ddp'; 'dp_size' belongs to strategy 'fsdp2'
        command line:1:25: optimizer.name: expected one of 'adamw', 'sgd'; got 'adam'; did you mean 'adamw'?
        command line:1:47: seed: expected an integer, got a mapping
        """,
    ),
    (
        """\
        model: gpt2
        distributed: {strategy: fsdp2, activation_checkpointing: {policy: full, scope: vison}}
        optimizer: {betas: [1, 2, 3]}
        """,
        [],
        """\
        r.yaml:2:80: distributed.activation_checkpointing.scope: 'vison' is not one of 'all', 'language', 'vision'; \
did you mean 'vision'?
        r.yaml:3:20: optimizer.betas: expected 2 items, got 3
        """,
    ),
]


@pytest.mark.parametrize(("text", "argv", "told"), BROKEN, ids=["hurried", "with overrides", "only __post_init__"])
def test_all_that_is_wrong_is_told_at_once(mistakes, text, argv, told):
    assert mistakes(text, *argv) == textwrap.dedent(told).splitlines()


def test_the_smallest_recipe_is_all_defaults(read, schema):
    assert read("model: a") == schema.Recipe(model="a")


def test_mistakes_are_data(schema):
    with pytest.raises(RecipeError) as caught:
        read_recipe(schema.Recipe, "recipes/broken.yaml", text="model: a\noptimizer:\n  nmae: sgd")
    (mistake,) = caught.value.mistakes
    assert (mistake.file, mistake.line, mistake.column) == ("recipes/broken.yaml", 3, 3)
    assert (mistake.path, mistake.message, mistake.suggestion) == ("optimizer.nmae", "unknown field", "name")


def test_a_file_and_a_command_line(tmp_path, schema):
    (tmp_path / "r.yaml").write_text("model: a\nseed: 1\n")
    rest, overrides = split_overrides(["train", "r.yaml", "--optimizer.lr", "1e-4"])
    assert rest == ["train", "r.yaml"]
    recipe = read_recipe(schema.Recipe, tmp_path / "r.yaml", overrides)
    assert recipe == schema.Recipe(model="a", seed=1, optimizer=schema.Optimizer(lr=1e-4))
