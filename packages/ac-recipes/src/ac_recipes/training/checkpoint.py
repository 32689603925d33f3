"""Checkpoints that are whole or absent.

NOTE [ Whole or absent ]
1. A checkpoint is written into a folder whose name ends in `.partial`. When every rank has written and synced its
   files, rank 0 writes `manifest.json`, which lists every file with its size and its checksum, and renames the folder.
   The rename is atomic: whatever kills the run, a folder named `step-N` is complete.
2. A reader takes a folder only if its manifest is there and every listed file has its listed size and, before it is
   loaded, its listed checksum. That covers what a rename cannot: a disk that lied, a copy that was cut off, a file that
   was deleted, a bit that flipped. Which one is the newest, its name says, and its manifest has to agree.
3. Nothing older is deleted before the new checkpoint stands. What is deleted is renamed to `.partial` first.
4. What has any other name, such as the copy `step-00000002-keep`, is somebody's: neither read nor deleted.
"""

import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ac_recipes.training.manifest import Checkpoint, name_of, read_manifest, record_files, step_of, write_manifest
from ac_recipes.training.ranks import Ranks

_PATIENCE = 600
"""Seconds to wait for another rank that writes a checkpoint by itself."""

_PARTIAL = re.compile(r"step-\d{8,}(\.alone)?\.partial", re.ASCII)


@dataclass(frozen=True)
class RunState:
    """What a checkpoint holds, of one rank: references, no copies.

    model: parameters and buffers under the names that the model has without checkpointing. optimizer: its state by
    parameter name.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> "RunState":
        """Neither is changed."""
        return cls(*get_state_dict(model, optimizer))

    @property
    def is_whole(self) -> bool:
        """Whether it is that of the whole model, and not this rank's share."""
        values = chain(self.model.values(), *(state.values() for state in self.optimizer["state"].values()))
        return all(each.to_local().shape == each.shape for each in values if isinstance(each, DTensor))


def save_checkpoint(
    folder: Path, step: int, state: RunState, ranks: Ranks, validation_loss: float | None = None
) -> Path:
    """Write `folder/step-N` from every rank; returns its path."""
    final = _path(folder, step)
    partial = final.with_name(f"{final.name}.partial")
    if ranks.is_first:
        discard_partial(folder)
        partial.mkdir(parents=True)
    ranks.wait()
    _write(partial, step, state, ranks, validation_loss)
    return final


def save_alone(folder: Path, step: int, state: RunState, device: torch.device) -> Path:
    """Write `folder/step-N` from this rank, whose `state` is whole, and communicate with no other.

    Of several ranks that try, one writes it, and the others return when it stands.

    Raises:
        OSError: another rank wrote it and did not end.
    """
    final = _path(folder, step)
    partial = final.with_name(f"{final.name}.alone.partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        _wait_for(final, partial)
        return final
    try:
        if not isinstance(read_manifest(final), Checkpoint):  # else another rank was there before
            _write(partial, step, state, Ranks(0, 1, device), None)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _wait_for(final: Path, partial: Path) -> None:
    for _ in range(_PATIENCE * 10):
        if not partial.exists():
            break
        time.sleep(0.1)
    if isinstance(wrong := read_manifest(final), str):
        raise OSError(f"another rank could not write it: {wrong}")


def _path(folder: Path, step: int) -> Path:
    return folder / name_of(step)


def _write(partial: Path, step: int, state: RunState, ranks: Ranks, validation_loss: float | None) -> None:
    """Fill the folder `partial`, and give it its name."""
    final = _path(partial.parent, step)
    with _single_process_is_fine():
        dcp.save(
            {"model": state.model, "optimizer": state.optimizer},
            checkpoint_id=partial,
            process_group=ranks.group,
            no_dist=ranks.world_size == 1,
        )
    ranks.wait()
    shares = ranks.gather(record_files(partial, ranks.rank, ranks.world_size))
    if ranks.is_first:
        files = {name: record for share in shares for name, record in share.items()}
        write_manifest(Checkpoint(final, step, ranks.world_size, validation_loss, files), partial)
        _sync_folder(partial)
        if final.exists():  # damaged: a run resumes from the newest sound checkpoint, so it comes here again
            shutil.rmtree(final)
        partial.rename(final)
        _sync_folder(final.parent)
    ranks.wait()


def judge(checkpoint: Checkpoint, validation_loss: float) -> None:
    """Let the checkpoint say which validation loss it has, nats a token: it was saved before that was measured.

    Raises:
        OSError: it cannot be written; the checkpoint is as it was.
    """
    write_manifest(replace(checkpoint, validation_loss=validation_loss), checkpoint.path)
    _sync_folder(checkpoint.path)


def discard_partial(folder: Path, step: int | None = None) -> None:
    """Delete what kills and failures have left in `folder`, or what the ranks together have written of `step`: it may
    fill the disk, and is of no use."""
    for path in list(folder.glob("step-*.partial" if step is None else f"{name_of(step)}.partial")):
        if _PARTIAL.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def whole_checkpoints(folder: Path) -> list[Checkpoint]:
    """The whole checkpoints in `folder`, oldest first; partial ones and those that lack something are left out."""
    return [found for found in found_checkpoints(folder) if isinstance(found, Checkpoint)]


def found_checkpoints(folder: Path) -> list[Checkpoint | str]:
    """What stands in `folder` under a checkpoint's name, oldest first: a whole one, or what is wrong with it."""
    steps = ((step_of(path.name), path) for path in folder.glob("step-*") if path.is_dir())
    return [read_manifest(path) for _, path in sorted((step, path) for step, path in steps if step is not None)]


def load_checkpoint(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> None:
    """Load into a model and an optimizer built as they were; the number of ranks and the strategy may differ.

    The optimizer's settings (betas, weight decay, ...) stay those that it was built with.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    with _single_process_is_fine():
        dcp.load(state, checkpoint_id=checkpoint.path)
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, asked in zip(optimizer.param_groups, settings, strict=True):
        group.update(asked)


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
