"""The sections `tensorboard` and `wandb` of a recipe. Loads without torch."""

from dataclasses import dataclass
from typing import Literal

from ac_recipes.section import Section


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig(Section):
    """Scalars for TensorBoard. The section is enough to turn it on: `tensorboard: {}`.

    log_dir: where to; `null`: `tensorboard/` in the run folder.
    """

    log_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_dir == "":
            raise ValueError("log_dir: is empty; null means tensorboard/ in the run folder")


@dataclass(frozen=True, kw_only=True)
class WandbConfig(Section):
    """Scalars, the recipe and the run's name for Weights & Biases. Fields are those of `wandb.init`.

    name: of the run; empty: that of the run folder.
    save_dir: where wandb keeps its files; `null`: the run folder.
    mode: `offline` writes files for `wandb sync`; `null`: what `WANDB_MODE` says, or else online.
    """

    project: str = "ac-recipes"
    entity: str | None = None
    name: str = ""
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    save_dir: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.project:
            raise ValueError("project: is empty; name the project that the run belongs to")
