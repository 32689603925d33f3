"""The README's python blocks run, and print what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()
DEMO, TAIL, *REST = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_demo(tmp_path: Path) -> None:
    # gloo of torch 2.13 may abort or hang when its group is destroyed, when all is done: that is left out here.
    end = "dist.destroy_process_group()\n"
    assert DEMO.endswith(end)
    ending = "import os, sys\ndist.barrier()\nsys.stdout.flush()\nos._exit(0)\n"
    (tmp_path / "demo.py").write_text(DEMO.removesuffix(end) + ending)
    (shown,) = re.findall(r"^\$ OMP_NUM_THREADS=1 (torchrun .* demo\.py)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    command, output = shown
    arguments = command.removeprefix("torchrun ").removesuffix("demo.py").split()
    printed = run("-m", "torch.distributed.run", *arguments, str(tmp_path / "demo.py"))
    # Two processes write to one pipe: lines may share a line end, and come in any order.
    assert sorted(re.findall(r"rank \d: kept .*? collectives", printed)) == output.splitlines()


def test_modes() -> None:
    (output,) = re.findall(r"^```\n(layer .*?)^```", README, re.MULTILINE | re.DOTALL)
    assert run("-c", f"{TAIL}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)") == output


def test_other_snippets() -> None:
    assert len(REST) == 3
    for snippet in REST:
        run("-c", f"{snippet}\nimport os\nos._exit(0)")
