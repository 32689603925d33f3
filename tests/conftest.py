"""Running the command line as a user does, under a timeout that ends it with all its ranks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

RECIPE = """\
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4}
distributed: {activation_checkpointing: true}
dataset: {sequence_length: 32}
tokenizer: {vocab_size: 320}
optimizer: {lr: 3.0e-3}
step_scheduler: {global_batch_size: 8, local_batch_size: 2, max_steps: 5, log_every_steps: 1}
"""


@dataclass
class Finished:
    code: int
    out: str
    err: str


class CommandLine:
    """`ac-recipes` in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "ac_recipes", *arguments],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a timeout can end the ranks as well
        )

    def __call__(self, *arguments: str, timeout: int = 180, **environment: str) -> Finished:
        process = self.start(*arguments, **environment)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{' '.join(arguments)} hung; it had printed\n{out}\n{err}")
        return Finished(process.returncode, out, err)

    def train(self, *arguments: str) -> dict[int, dict]:
        """Train the small recipe; its metrics by step."""
        done = self("train", "small.yaml", "--json", *arguments)
        assert done.code == 0, done.err
        return self.metrics(Path(json.loads(done.out)["run"]))

    def metrics(self, run: Path) -> dict[int, dict]:
        lines = map(json.loads, (self.folder / run / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line for line in lines if "loss" in line}


@pytest.fixture(scope="session")
def new_command_line(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], CommandLine]:
    """`ac-recipes` in a folder of its own, with the small recipe in it."""

    def make() -> CommandLine:
        folder = tmp_path_factory.mktemp("ac-recipes")
        (folder / "small.yaml").write_text(RECIPE)
        return CommandLine(folder)

    return make


@pytest.fixture
def ac_recipes(new_command_line: Callable[[], CommandLine]) -> CommandLine:
    return new_command_line()
