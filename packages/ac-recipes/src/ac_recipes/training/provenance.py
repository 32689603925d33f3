"""What a run was made with, so that it can be made again: command, code, packages, machine."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from ac_recipes.invocation import Invocation
from ac_recipes.training.ranks import Ranks

_DIFF_LIMIT = 2**18
_TELLING = ("CUDA_", "CUBLAS_", "NCCL_", "GLOO_", "OMP_", "GOMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "SLURM_JOB_")
"""Environment variables that change what a run computes or tell where it ran. Others may hold secrets."""


def session(invocation: Invocation, ranks: Ranks, *, done: int) -> dict[str, Any]:
    """One start of a run, of which `done` steps were done already, as plain data."""
    device = ranks.device
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps_done": done,
        "command": [invocation.prefix, *invocation.arguments],
        "working_directory": str(Path.cwd()),
        "git": git_state(Path.cwd()),
        "python": sys.version.split()[0],
        "packages": dict(sorted((d.metadata["Name"], d.version) for d in distributions() if d.metadata["Name"])),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cuda": torch.version.cuda,
        },
        "ranks": ranks.world_size,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_TELLING)},
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, changed files and their changes of the checkout that `folder` is in; None where there is none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git(folder, "diff", "HEAD") or ""
    return {
        "commit": commit.strip(),
        "changed": (_git(folder, "status", "--porcelain") or "").splitlines(),
        "diff": diff if len(diff) <= _DIFF_LIMIT else f"left out: {len(diff)} characters",
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
