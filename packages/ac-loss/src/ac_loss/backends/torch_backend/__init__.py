"""The ``torch`` backend: chunks of tokens on any device, in plain torch."""

from ac_loss.backends.torch_backend.sweep import run

__all__ = ["NAME", "OPT_IN", "objections", "run"]

NAME = "torch"
OPT_IN = None


def objections(request: object) -> list[str]:
    """None: everything that passes the checks at the door is computed."""
    return []
