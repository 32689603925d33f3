"""Errors that a user can do something about. The command line prints their message and no traceback."""

import signal


class RunError(RuntimeError):
    """The run cannot start or go on. The message says what is wrong and what to do."""

    exit_code = 1


class UsageError(ValueError):
    """The command, the machine or the data does not fit what was asked for. Nothing was trained."""

    exit_code = 2


class RunInterruptedError(RunError):
    """A signal ended the run. What its last checkpoint holds is kept."""

    def __init__(self, signum: int) -> None:
        super().__init__(
            f"ended by {signal.Signals(signum).name}; ac-recipes train RECIPE --resume goes on from the last checkpoint"
        )
        self.exit_code = 128 + signum
