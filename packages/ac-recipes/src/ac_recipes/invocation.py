"""The command that a run was started with, and the commands that go with it."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCH_FLAGS = (
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--master-addr",
    "--master-port",
)
"""Flags of `train` that say which ranks to start; a rank is not told them."""

_HANDED_ON = "AC_RECIPES_ARGUMENTS"
_GIB = 2**30


@dataclass(frozen=True)
class Invocation:
    """`ac-recipes train ...` as the user typed it.

    arguments: all of them, the verb first. prefix: what goes before `train`.
    """

    arguments: tuple[str, ...]
    prefix: str = "ac-recipes"

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Invocation":
        """From this process's arguments; in a rank, from those of the launcher that started it."""
        if _HANDED_ON in os.environ:
            return cls(tuple(json.loads(os.environ[_HANDED_ON])))
        return cls(tuple(arguments), _torchrun() or "ac-recipes")

    def hand_on(self) -> None:
        """Let the ranks that this process starts know it."""
        os.environ[_HANDED_ON] = json.dumps(self.arguments)

    def resume(self, run: Path, settings: Mapping[str, object] | None = None) -> str:
        """The command that goes on with the run in the folder `run`; `settings`, by their paths, in place of those that
        were typed."""
        arguments = without(self.arguments, "--resume", value_may_be_missing=True)
        changed = {f"--{path}": str(value) for path, value in (settings or {}).items()}
        arguments = without(arguments, *changed)
        return f"{self.prefix} {shlex.join([*arguments, *sum(changed.items(), ()), '--resume', str(run)])}"

    def plan(self, budget_bytes: int) -> str:
        """The command that finds a policy for this recipe within `budget_bytes` on one device."""
        arguments = without(self.arguments, "--resume", value_may_be_missing=True)
        recipe_and_overrides = [word for word in without(arguments, *LAUNCH_FLAGS)[1:] if word != "--json"]
        budget = f"{int(budget_bytes * 10 / _GIB) / 10:g}GiB"
        return f"ac-recipes {shlex.join(['plan', *recipe_and_overrides, '--budget', budget])}"


def _torchrun() -> str | None:
    """The `torchrun` that started this process, by what it leaves in the environment, up to our own arguments. Where
    nodes meet it does not say. None: another program did."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    nodes, ranks = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    several = f"--nnodes {nodes} --rdzv-endpoint HOST:PORT " * (nodes != "1")
    return f"torchrun {several}--nproc-per-node {ranks} -m ac_recipes"


def without(arguments: Sequence[str], *flags: str, value_may_be_missing: bool = False) -> list[str]:
    """The arguments less some flags and their values, in both spellings (`--flag VALUE`, `--flag=VALUE`)."""
    kept, after_flag = [], False
    for argument in arguments:
        is_value = after_flag and not (value_may_be_missing and argument.startswith("-"))
        after_flag = not is_value and argument in flags
        if not (is_value or after_flag or argument.partition("=")[0] in flags):
            kept.append(argument)
    return kept
