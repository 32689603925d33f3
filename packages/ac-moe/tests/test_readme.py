"""The README's python blocks run, and print what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROGRAMS = {block.split()[1]: block for block in BLOCKS if re.match(r"# \w+\.py\n", block)}
REST = [block for block in BLOCKS if block not in PROGRAMS.values()]

FORKED = """
    child = os.fork()
    if not child:
        exec(snippet, {"__name__": "__main__"})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
"""


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed_by(name: str, folder: Path) -> tuple[str, str]:
    """What the ranks of a program print, and what the README says that they do."""
    # gloo of torch 2.13 may abort or hang when its group is destroyed, when all is done: that is left out here.
    end = "dist.destroy_process_group()\n"
    assert PROGRAMS[name].endswith(end)
    ending = "import os, sys\ndist.barrier()\nsys.stdout.flush()\nos._exit(0)\n"
    (folder / name).write_text(PROGRAMS[name].removesuffix(end) + ending)
    shown = re.findall(
        rf"^\$ OMP_NUM_THREADS=1 (torchrun [^\n]*{re.escape(name)})\n(.*?)^```", README, re.MULTILINE | re.DOTALL
    )
    ((command, output),) = shown
    arguments = command.removeprefix("torchrun ").removesuffix(name).split()
    return run("-m", "torch.distributed.run", *arguments, str(folder / name)), output


def test_demo(tmp_path: Path) -> None:
    printed, output = printed_by("demo.py", tmp_path)
    # Two processes write to one pipe: lines may share a line end, and come in any order.
    assert sorted(re.findall(r"rank \d: kept .*? collectives", printed)) == output.splitlines()


def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed, output = printed_by("train_moe.py", tmp_path)
    assert output in printed


def test_modes() -> None:
    (output,) = re.findall(r"^```\n(layer .*?)^```", README, re.MULTILINE | re.DOTALL)
    assert run("-c", f"{PROGRAMS['tail.py']}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)") == output


def test_other_snippets() -> None:
    assert len(REST) == 3
    # Each in a process of its own, which is forked when torch is there: its import takes longer than they do.
    run("-c", f"import ac_moe, os, torch\nfor snippet in {REST!r}:\n{FORKED}")
