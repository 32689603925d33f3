"""The snippets of the README run."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(snippet):
    exec(compile(snippet, str(README), "exec"), {})


def test_what_the_first_prints_is_what_it_says(capsys):
    exec(compile(SNIPPETS[0], str(README), "exec"), {})
    said = "\n".join(line[2:] for line in SNIPPETS[0].splitlines() if line.startswith("# "))
    assert capsys.readouterr().out.strip() == said
