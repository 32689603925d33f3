"""The manifest of a checkpoint: every file with its size and its checksum.

The sizes tell at once whether a folder is whole; the checksums, whether every bit is what was written. Ranks share the
reading that checksums take, when a checkpoint is written as when it is loaded.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ac_recipes.training.numbers import json_number

MANIFEST = "manifest.json"


class FileRecord(NamedTuple):
    """What is known of a file: its size in bytes and its SHA-256, in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files are all there in their full size.

    step: optimizer steps done. world_size: ranks that wrote it. validation_loss: at that step, where it was measured.
    files: by their path inside `path`.
    """

    path: Path
    step: int
    world_size: int
    validation_loss: float | None
    files: dict[str, FileRecord]


def name_of(step: int) -> str:
    """The name of the folder of a checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of the checkpoint whose folder has this name; None for a name that no checkpoint has."""
    written = re.fullmatch(r"step-(\d{8,})", name, re.ASCII)
    return int(written[1]) if written and name_of(int(written[1])) == name else None


def record_files(folder: Path, share: int = 0, of: int = 1) -> dict[str, FileRecord]:
    """Every file below `folder` of which rank `share` of `of` ranks takes the checksum."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name: _record(folder / name) for name in names[share::of]}


def write_manifest(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the manifest of `checkpoint` into `folder`, where its files are, and sync it. One that is there already is
    replaced at once, or not at all."""
    manifest = {
        "step": checkpoint.step,
        "world_size": checkpoint.world_size,
        "validation_loss": json_number(checkpoint.validation_loss),
        "files": {name: record._asdict() for name, record in checkpoint.files.items()},
    }
    partial = folder / f"{MANIFEST}.partial"
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / MANIFEST)
    finally:
        partial.unlink(missing_ok=True)


def read_manifest(path: Path) -> Checkpoint | str:
    """The checkpoint in the folder `path`, or what is wrong with it: a file is missing or has another size, or the
    manifest is not that of this step. Reads no file but the manifest."""
    name = MANIFEST
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {name: FileRecord(int(f["size"]), str(f["sha256"])) for name, f in manifest["files"].items()}
        step, ranks, loss = manifest["step"], int(manifest["world_size"]), manifest["validation_loss"]
        if type(step) is not int or step != step_of(path.name):
            return f"{path / MANIFEST} is of step {step!r}, which the folder's name is not"
        if ".metadata" not in files:
            return f"{path / MANIFEST} lists no .metadata"
        for name, record in files.items():
            if (size := (path / name).stat().st_size) != record.size:
                return f"{path / name} has {size} bytes in place of {record.size}"
    except OSError as error:
        return f"{path / name} cannot be read: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path / MANIFEST} is no manifest of a checkpoint ({type(error).__name__})"
    return Checkpoint(path, step, ranks, None if loss is None else float(loss), files)


def damage(checkpoint: Checkpoint, share: int = 0, of: int = 1) -> str | None:
    """What is wrong with the files that rank `share` of `of` ranks reads; None if every checksum is right."""
    for name in sorted(checkpoint.files)[share::of]:
        try:
            if _record(checkpoint.path / name) != checkpoint.files[name]:
                return f"{checkpoint.path / name} is not what was written: its checksum differs from the manifest's"
        except OSError as error:
            return f"{checkpoint.path / name} cannot be read: {error.strerror or error}"
    return None


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), digest)
