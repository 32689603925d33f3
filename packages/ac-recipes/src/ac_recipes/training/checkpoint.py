"""Checkpoints that are whole or absent.

NOTE [ Whole or absent ]
1. A checkpoint is written into a folder whose name ends in `.partial`. When every rank has written and synced its
   files, rank 0 writes `manifest.json`, which lists every file with its size, and renames the folder. The rename is
   atomic: whatever kills the run, a folder named `step-N` is complete.
2. A reader takes a folder only if its manifest is there and every listed file has its listed size. That covers what a
   rename cannot: a disk that lied, a copy that was cut off, a file that was deleted.
3. Nothing older is deleted before the new checkpoint stands.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ac_recipes.training.ranks import Ranks

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk: `step` optimizer steps done, written by `world_size` ranks."""

    path: Path
    step: int
    world_size: int


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> Path:
    """Write `folder/step-N` from every rank; returns its path. The model and the optimizer are not changed.

    Holds the parameters and buffers under the names that the model has without checkpointing, the optimizer's state
    by parameter name, and every rank's random-number state.
    """
    final = folder / f"step-{step:08d}"
    partial = final.with_name(f"{final.name}.partial")
    if ranks.is_first:
        for leftover in (partial, final):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.wait()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with _single_process_is_fine():
        dcp.save(
            {"model": model_state, "optimizer": optimizer_state, "rng": {str(ranks.rank): _rng_state(ranks)}},
            checkpoint_id=partial,
        )
    ranks.wait()
    if ranks.is_first:
        files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
        manifest = {"step": step, "world_size": ranks.world_size, "files": files}
        with (partial / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        partial.rename(final)
        _sync_folder(folder)
    ranks.wait()
    return final


def whole_checkpoints(folder: Path) -> list[Checkpoint]:
    """The whole checkpoints in `folder`, oldest first; partial and damaged ones are left out."""
    found = [c for path in folder.glob("step-*") if path.is_dir() and (c := _read_manifest(path)) is not None]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def load_checkpoint(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> bool:
    """Load into a model and an optimizer built as they were; the number of ranks and the strategy may differ.

    Returns:
        Whether the random-number state was restored: it belongs to a rank, so only on as many ranks as wrote it.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    same_ranks = checkpoint.world_size == ranks.world_size
    if same_ranks:
        state["rng"] = {str(ranks.rank): _rng_state(ranks)}
    with _single_process_is_fine():
        dcp.load(state, checkpoint_id=checkpoint.path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if same_ranks:
        _set_rng_state(state["rng"][str(ranks.rank)], ranks)
    return same_ranks


def _read_manifest(path: Path) -> Checkpoint | None:
    if path.suffix == ".partial":
        return None
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        whole = all((path / name).stat().st_size == size for name, size in manifest["files"].items())
        whole = whole and ".metadata" in manifest["files"] and isinstance(manifest["step"], int)
        return Checkpoint(path, manifest["step"], manifest["world_size"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _rng_state(ranks: Ranks) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def _set_rng_state(state: dict[str, Tensor], ranks: Ranks) -> None:
    torch.set_rng_state(state["cpu"])
    if ranks.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], ranks.device)


@contextmanager
def _single_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*uninitialized")
        yield


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
