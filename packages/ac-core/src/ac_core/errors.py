"""What ac-core raises when checkpointing cannot be what was asked for."""


class ActivationCheckpointingError(RuntimeError):
    """Checkpointing as asked for is impossible on this model. The message names the constraint and the remedy.

    Mistakes in a setting itself (an unknown policy, a bad scope) are `ValueError`, raised where the setting is read.
    """
