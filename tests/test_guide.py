"""Every command and every snippet of the user guide runs, in the order of its page.

A comment `<!-- also: ARGUMENTS -->` before a block of commands makes them small: the arguments are added to each.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ac_recipes.cli import main

GUIDE = Path(__file__).parents[1] / "docs" / "guide"
BLOCK = re.compile(r"(?:^<!-- also: (?P<also>[^\n]*) -->\n)?^```(?P<kind>bash|python)\n(?P<text>.*?)^```", re.M | re.S)
PAGES = sorted(path.name for path in GUIDE.glob("*.md"))


def blocks(page, kind):
    return [match for match in BLOCK.finditer((GUIDE / page).read_text()) if match["kind"] == kind]


COMMANDS = [page for page in PAGES if blocks(page, "bash")]
SNIPPETS = [(page, place) for page in PAGES for place in range(len(blocks(page, "python")))]


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_run(page, ac_recipes, monkeypatch):
    if "vlm-digits" in (GUIDE / page).read_text():
        pytest.importorskip("sklearn")
    monkeypatch.chdir(ac_recipes.folder)
    for block in blocks(page, "bash"):
        for line in block["text"].splitlines():
            program, *arguments = shlex.split(line)
            assert program == "ac-recipes"
            arguments += shlex.split(block["also"] or "")
            # In this process, which has loaded torch already; ranks are processes of their own.
            code = ac_recipes(*arguments).code if "--nproc-per-node" in arguments else main(arguments)
            assert code == 0, line


@pytest.mark.parametrize(("page", "place"), SNIPPETS)
def test_snippets_run(page, place):
    text = blocks(page, "python")[place]["text"]
    if "init_process_group" in text:  # gloo's end may hang (docs/facts.md), and its group would stay for other tests
        done = subprocess.run([sys.executable, "-c", f"{text}\nimport os\nos._exit(0)"], timeout=120, check=False)
        assert done.returncode == 0
        return
    exec(compile(text, page, "exec"), {})


def test_pages_are_listed_and_links_lead_somewhere():
    listed = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (GUIDE / "README.md").read_text()))
    assert listed == set(PAGES) - {"README.md"}
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", (GUIDE / page).read_text()):
            assert (GUIDE / link).exists(), f"{page}: {link}"
