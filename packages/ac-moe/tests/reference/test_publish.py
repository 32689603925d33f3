"""In processes of their own: what a process has imported stays imported."""

import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str, *path: Path) -> str:
    header = f"import sys; sys.path[:0] = {[str(folder) for folder in path]!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", header + code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_is_there_inside_and_gone_after() -> None:
    assert run(
        "import importlib.util, ac_moe\n"
        "with ac_moe.reference.install():\n"
        "    with ac_moe.reference.install():\n"
        "        import deep_ep\n"
        "    from deep_ep import HybridEPBuffer\n"
        "    assert importlib.util.find_spec('deep_ep').name == 'deep_ep'\n"
        "print(HybridEPBuffer is ac_moe.reference.HybridEPBuffer, 'deep_ep' in sys.modules)\n"
        "installation = ac_moe.reference.install()\n"
        "print('deep_ep' in sys.modules)\n"
        "installation.uninstall()\n"
        "print('deep_ep' in sys.modules)\n"
    ).split() == ["True", "False", "True", "False"]


@pytest.mark.parametrize("imported", ["", "import deep_ep\n"])
def test_never_shadows_a_real_one(tmp_path: Path, imported: str) -> None:
    (tmp_path / "deep_ep.py").write_text("class HybridEPBuffer: ...")
    code = (
        f"{imported}import ac_moe\n"
        "try:\n    ac_moe.reference.install()\n"
        "except RuntimeError as error:\n    print(error)\n"
        "import deep_ep\nprint(deep_ep.HybridEPBuffer is ac_moe.reference.HybridEPBuffer)"
    )
    message, shadowed = run(code, tmp_path).splitlines()
    assert message.startswith("deep_ep: DeepEP is installed")
    assert "buffer=ac_moe.reference.HybridEPBuffer" in message
    assert shadowed == "False"


def test_megatron_finds_it_if_it_looks_later() -> None:
    pytest.importorskip("megatron.core")
    found, message = run(
        "import ac_moe\n"
        "with ac_moe.reference.install():\n"
        "    from megatron.core.transformer.moe import fused_a2a\n"
        "print(fused_a2a.HAVE_HYBRIDEP)\n"
        "fused_a2a.HAVE_HYBRIDEP = False\n"  # as where it was imported before
        "try:\n    ac_moe.reference.install()\n"
        "except RuntimeError as error:\n    print(error)\n"
    ).splitlines()
    assert found == "True"
    assert "before the first import of Megatron's MoE layers" in message
