"""What ac-core raises when checkpointing cannot be what was asked for."""

from ac_core.advice import Advice


class ActivationCheckpointingError(RuntimeError):
    """Checkpointing as asked for is impossible on this model. The message names the constraint and the remedy.

    Mistakes in a setting itself (an unknown policy, a bad scope) are `ValueError`, raised where the setting is read.
    """


class BudgetError(ActivationCheckpointingError):
    """No plan is within a memory budget. advice: the message, its settings as data, for other words than Python's."""

    def __init__(self, advice: Advice) -> None:
        super().__init__(advice)
        self.advice = advice


class RecomputeMismatchError(ActivationCheckpointingError):
    """The recompute of a block saved other tensors than its forward did: its gradients would be wrong.

    block: its name. index: position of the first saved tensor that differs, from 0. cause: the probable cause in a word
    or two (`"cache"`, `"random"`, `"training"`, `"attribute"`, ..., `"unknown"`); the message has the evidence and the
    remedy.
    """

    def __init__(self, message: str, *, block: str = "", index: int = 0, cause: str = "unknown") -> None:
        super().__init__(message)
        self.block = block
        self.index = index
        self.cause = cause
