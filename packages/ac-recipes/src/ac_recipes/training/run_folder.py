"""The folder of a run: recipe, tokenizer, one line of metrics a step, one of each start, the checkpoints."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ac_recipes.errors import RunError, UsageError
from ac_recipes.reader import dump
from ac_recipes.recipe import Recipe
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.numbers import json_number


@dataclass(frozen=True)
class RunFolder:
    """`recipe.yaml`, the tokenizer, `data.sha256`, `metrics.jsonl`, `sessions.jsonl`, `run.lock`, `checkpoints/`
    and, with LoRA, `adapter/` of one run."""

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str, recipe: Recipe) -> "RunFolder":
        """A new folder `parent/name-TIME`, with the resolved recipe in it.

        Raises:
            UsageError: it cannot be made.
            OSError: the recipe cannot be written; the folder is gone again.
        """
        stem = f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
            path = parent / f"{stem}{suffix}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if parent.is_dir():
                    continue
                raise UsageError(f"run.dir: {parent} is not a folder") from None
            except OSError as error:
                raise UsageError(f"run.dir: cannot make a folder in {parent}: {error.strerror or error}") from error
            break
        run = cls(path)
        try:
            run.write_recipe(recipe)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return run

    @classmethod
    def newest(cls, parent: Path, name: str) -> "RunFolder | None":
        """The newest run of this recipe that has a whole checkpoint."""
        pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}(-\d+)?")
        runs = [path for path in parent.glob("*") if pattern.fullmatch(path.name) and path.is_dir()]
        runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        return next((cls(path) for path in runs if whole_checkpoints(path / "checkpoints")), None)

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def sessions(self) -> Path:
        return self.path / "sessions.jsonl"

    @property
    def fingerprint(self) -> Path:
        return self.path / "data.sha256"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def check_there(self) -> None:
        """Before anything is written into it: a folder that was deleted or moved is not made anew, as nothing could go
        on from what would then be in it.

        Raises:
            RunError: it is gone, or its recipe is.
        """
        if not self.recipe.exists():
            raise RunError(
                f"the folder of the run was deleted or moved: {self.recipe} is gone, and without it nothing could go "
                "on from what would be saved there. Start the run anew"
            )

    def write_recipe(self, recipe: Recipe) -> None:
        """Keep the recipe with every default and override resolved, in place of an earlier one."""
        _replace(self.recipe, dump(recipe))

    def write_metrics(self, *lines: dict[str, Any]) -> None:
        """Append lines: all, or none.

        Raises:
            OSError: they cannot be written.
            RunError: as `check_there`.
        """
        self.check_there()
        _append(self.metrics, *lines)

    def write_session(self, values: dict[str, Any]) -> None:
        """Append one start of the run, the first or a resumed one."""
        _append(self.sessions, values)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines so far. What is not a line of metrics, such as one that a kill cut off, is left out."""
        if not self.metrics.exists():
            return []
        lines = []
        for text in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
        return lines

    def drop_metrics_after(self, step: int) -> None:
        """Forget what came after a checkpoint that the run now goes on from: those steps are made again."""
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        _replace(self.metrics, "".join(json_line(line) + "\n" for line in kept))


def json_line(values: dict[str, Any]) -> str:
    """One line of a `.jsonl` file."""
    plain = {name: json_number(value) if isinstance(value, float) else value for name, value in values.items()}
    return json.dumps(plain, allow_nan=False)


def _append(path: Path, *lines: dict[str, Any]) -> None:
    left = "".join(json_line(line) + "\n" for line in lines).encode()
    with _named(path), path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)
            raise


def _replace(path: Path, text: str) -> None:
    # Written beside and renamed, so that a kill leaves the old file or the new one.
    partial = path.with_name(f"{path.name}.partial")
    with _named(path), partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of a write names the file, as one of opening does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
