"""A recipe is data: reading one imports nothing and runs nothing, and the reader itself needs little."""

import json
import subprocess
import sys

import pytest

from ac_recipes.reader import RecipeError, read_recipe

CODE = [
    "{_target_: os.getpid}",
    "{_target_: builtins.exec, _args_: ['raise SystemExit']}",
    "{_target_: antigravity.webbrowser}",
    "!!python/object/apply:os.system ['touch hacked']",
    "!!python/object/new:antigravity.x []",
    "!!python/name:this.s",
    "!!python/module:antigravity",
    "!!timestamp 2024-01-01",
]


@pytest.mark.parametrize("extra", CODE)
def test_nothing_is_imported(schema, extra):
    before = set(sys.modules)
    with pytest.raises(RecipeError) as caught:
        read_recipe(schema.Recipe, "r.yaml", text=f"model: a\nextra: {extra}")
    assert set(sys.modules) == before
    (mistake,) = caught.value.mistakes
    assert mistake.path in ("extra", "extra._target_")


# Python tells an audit hook of every import, compilation, exec, opened file and new process. A hook cannot be removed,
# hence a process of its own; the first, valid recipe is there to import and cache what reading needs.
AUDIT = """
import dataclasses, json, sys, typing
from ac_recipes.reader import RecipeError, read_recipe

Schema = dataclasses.make_dataclass("Schema", [("extra", typing.Any)], frozen=True)
told = []

def read(text):
    try:
        read_recipe(Schema, "r.yaml", text=text)
    except RecipeError as error:
        told.append(str(error))

read("extra: 1"), read("extra: {_target_: x, 1: 2}"), read("[")
events, told = [], []
sys.addaudithook(lambda event, arguments: events.append([event, repr(arguments)]))
for extra in json.loads(sys.argv[1]):
    read("extra: " + extra)
found = [event for event in events if event[0].partition(".")[0] in
         ("import", "exec", "compile", "open", "os", "subprocess", "marshal", "pickle", "socket", "ctypes")]
print(json.dumps([len(told), found]))
"""


def test_nothing_runs(tmp_path):
    command = [sys.executable, "-c", AUDIT, json.dumps(CODE)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(run.stdout) == [len(CODE), []]
    assert list(tmp_path.iterdir()) == []


def test_the_reader_needs_neither_torch_nor_transformers():
    code = "import sys, ac_recipes.reader; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
