"""Errors that a user can do something about. The command line prints their message and no traceback."""

import signal


class RunError(RuntimeError):
    """The run cannot start or go on. The message says what is wrong and what to do."""

    exit_code = 1


class UsageError(ValueError):
    """The command, the machine or the data does not fit what was asked for. Nothing was trained."""

    exit_code = 2


class RankError(RunError):
    """One rank cannot go on; the others do not know why."""


class LostPeerError(RankError):
    """This rank is well, but another one has ended. That one says why, unless it was killed.

    kept: what the run goes on from, and with which command. has_saved: whether this rank has written that.
    """

    def __init__(self, message: str, kept: str, *, has_saved: bool = False) -> None:
        super().__init__(message)
        self.kept = kept
        self.has_saved = has_saved


class RunInterruptedError(RunError):
    """A signal ended the command. what_now: of a run, what is kept and how to go on."""

    def __init__(self, signum: int, what_now: str | None = None) -> None:
        said = f"ended by {signal.Signals(signum).name}"
        super().__init__(said if what_now is None else f"{said}; {what_now}")
        self.exit_code = 128 + signum
