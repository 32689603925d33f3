"""Errors that a user can do something about. The command line prints their message and no traceback."""


class RunError(RuntimeError):
    """The run cannot start or go on. The message says what is wrong and what to do."""

    exit_code = 1


class UsageError(ValueError):
    """The command, the machine or the data does not fit what was asked for. Nothing was trained."""

    exit_code = 2
