import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_there_are_snippets():
    assert len(SNIPPETS) >= 2


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.splitlines()[0][:40])
def test_snippets_run(snippet):
    if "from transformers" in snippet:
        pytest.importorskip("transformers")
    exec(compile(snippet, str(README), "exec"), {})
