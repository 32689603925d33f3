"""`import ac_recipes` is light, and its public names are there."""

import subprocess
import sys

import pytest

import ac_recipes


def test_the_command_line_starts_without_torch():
    script = """
import contextlib, sys
from ac_recipes.cli import main
with contextlib.suppress(SystemExit):
    main(["train", "--help"])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_every_public_name_is_there():
    assert all(getattr(ac_recipes, name) is not None for name in ac_recipes.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = ac_recipes.trian
