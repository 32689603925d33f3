"""What is compared: each variant changes a fresh copy of the model in place."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn


class Unavailable(Exception):  # noqa: N818 - an outcome that the table shows, not an error of the run
    """Why a variant cannot run here."""


@dataclass(frozen=True)
class Variant:
    """A way to checkpoint. `apply` changes the model in place, or raises `Unavailable`.

    owner: `"none"`, `"ours"`, or the tool whose checkpointing it is. policy: `"none"`, `"full"`, `"selective"`.
    """

    owner: str
    policy: str
    apply: Callable[[nn.Module], None]
    options: str = ""

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return " ".join(dict.fromkeys(filter(None, (self.owner, self.policy, self.options))))


def no_checkpointing() -> Variant:
    """What everything is compared with."""
    return Variant("none", "none", lambda _: None)


def ours(policy: str, options: Mapping[str, Any] | None = None) -> Variant:
    """ac-core through its public API. options: fields of `ActivationCheckpointingConfig` beside the policy."""

    def apply(model: nn.Module) -> None:
        import ac_core

        known = {field.name for field in fields(ac_core.ActivationCheckpointingConfig)} - {"policy"}
        if unknown := sorted(set(options or {}) - known):
            raise Unavailable(f"ActivationCheckpointingConfig has no {', '.join(unknown)}; it has {sorted(known)}")
        try:
            config = ac_core.ActivationCheckpointingConfig(policy=policy, **(options or {}))
            ac_core.apply_activation_checkpointing(model, config)
        except (ValueError, ac_core.ActivationCheckpointingError) as refusal:
            raise Unavailable(str(refusal)) from refusal

    return Variant("ours", policy, apply, json.dumps(options) if options else "")


def hugging_face() -> Variant:
    """`gradient_checkpointing_enable` of transformers, non-reentrant as ours."""

    def apply(model: nn.Module) -> None:
        with warnings.catch_warnings():
            # transformers 5.24 renames it and keeps this name until 6; releases before know this name alone.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    return Variant("Hugging Face", "full", apply)


def torch_wrapper() -> Variant:
    """torch's `checkpoint_wrapper` around each block, with its defaults."""

    def apply(model: nn.Module) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        blocks = model.model.layers
        for index, block in enumerate(blocks):
            blocks[index] = checkpoint_wrapper(block)

    return Variant("torch wrapper", "full", apply)
