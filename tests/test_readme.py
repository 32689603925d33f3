"""What the README tells a newcomer to type works as it stands there, on a small model."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SCRIPTS = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["scripts"]
SMALL = [
    "--model.config={model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2}",
    "--step_scheduler.max_steps=2",
    "--tokenizer.vocab_size=300",
    "--dataset.sequence_length=32",
]


def commands() -> list[list[str]]:
    """The indented `hatch run ...` lines, as arguments of `ac-recipes` or of the script they name."""
    found = []
    for line in re.findall(r"^    (?:pip install hatch && )?hatch run (.*?)(?:  +#.*)?$", README, re.MULTILINE):
        name, *arguments = shlex.split(line)
        script = SCRIPTS.get(name, name + " {args}")
        found.append([word for word in shlex.split(re.sub(r"\{args.*?\}", "", script)) + arguments if word])
    return found


def test_the_two_commands_are_there():
    assert "    pip install hatch && hatch run train\n" in README
    assert "    pip install hatch && hatch run test\n" in README
    assert ["ac-recipes", "train", "default"] in commands()
    assert SCRIPTS["test"] == "pytest {args:packages tests}"


def test_every_command_runs(ac_recipes):
    (ac_recipes.folder / "my_recipe.yaml").write_text((ac_recipes.folder / "small.yaml").read_text())
    ran = 0
    for program, *arguments in commands():
        if program != "ac-recipes":
            continue
        # A recipe of the README is the reader's own; ours is small already.
        extra = SMALL if arguments[:2] == ["train", "default"] else []
        done = ac_recipes(*arguments, *extra)
        assert done.code == 0, f"{arguments}\n{done.out}\n{done.err}"
        ran += 1
    assert ran >= 5


def test_the_mistake_it_shows_is_the_one_that_is_made(ac_recipes):
    shipped = (ROOT / "packages/ac-recipes/src/ac_recipes/recipes/default.yaml").read_text()
    (ac_recipes.folder / "recipe.yaml").write_text(shipped.replace("checkpointing: true", "checkpointing: selctive"))
    done = ac_recipes("check", "recipe.yaml")
    assert done.code == 2
    assert " ".join(done.out.split()) in " ".join(README.split())


@pytest.mark.parametrize("snippet", re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE))
def test_snippets_run(snippet):
    exec(compile(snippet, "README.md", "exec"), {})
