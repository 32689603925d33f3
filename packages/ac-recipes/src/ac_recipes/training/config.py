"""The section `checkpoint` of a recipe. Loads without torch."""

from dataclasses import dataclass

from ac_recipes.section import Section


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Checkpoints of torch.distributed.checkpoint in the run folder, every `step_scheduler.ckpt_every_steps` steps.

    enabled: whether any is written.
    keep_last: how many of the newest are kept; `null`: all of them.
    keep_best: how many more are kept for their validation loss, the lowest first. Every checkpoint is then preceded by
        a validation, whatever `step_scheduler.val_every_steps` says.
    """

    enabled: bool = True
    keep_last: int | None = None
    keep_best: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(
                f"keep_last: {self.keep_last} is below 1, and a run could not be resumed; null keeps all, enabled: "
                "false writes none"
            )
        if self.keep_best < 0:
            raise ValueError(f"keep_best: {self.keep_best} is below 0")
        if self.keep_best and self.keep_last is None:
            raise ValueError(
                f"keep_best: {self.keep_best} has no effect while keep_last is null, which keeps every checkpoint; "
                "set keep_last as well"
            )
