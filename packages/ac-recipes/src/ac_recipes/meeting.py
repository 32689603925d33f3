"""Where the launchers of several nodes meet: looked at before torch's launcher waits there, which says little if it
cannot and hears no signal meanwhile."""

import re
import socket
import time

from ac_recipes.errors import RunError, UsageError

PATIENCE = 60.0
"""Seconds that a node waits for the one where all meet."""


def host_and_port(flag: str, endpoint: str) -> tuple[str, int]:
    """Of HOST:PORT. An IPv6 address stands in brackets.

    Raises:
        UsageError: it has another form.
    """
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):(\d+)", endpoint.strip())
    if found is None:
        raise UsageError(f"{flag}: '{endpoint}' is not HOST:PORT, such as node0:29500")
    return found[1].strip("[]"), checked_port(flag, int(found[2]))


def checked_port(flag: str, port: int) -> int:
    """A port that others can be told.

    Raises:
        UsageError: there is no such port.
    """
    if not 1 <= port <= 65535:
        raise UsageError(f"{flag}: {port} is not a port, which is a number from 1 to 65535; 29500 is torch's")
    return port


def reach(flag: str, host: str, port: int, *, patience: float = PATIENCE) -> None:
    """Wait until a launcher listens at `host`:`port`, if that is another machine; here one will be started.

    Raises:
        UsageError: the name of the host does not resolve.
        RunError: nobody listens there.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag}: the name {host} cannot be resolved on this machine: {reason}") from error
    if any(_is_here(family, address) for family, *_, address in addresses):
        return
    deadline = time.monotonic() + patience
    while (reason := _refusal(addresses)) is not None:
        if time.monotonic() >= deadline:
            raise RunError(
                f"{flag}: cannot reach {host}:{port} in {patience:g} seconds: {reason}; start the command on that node "
                "as well, and see that nothing between the nodes blocks the port"
            )
        time.sleep(min(1.0, patience))


def _is_here(family: int, address: tuple) -> bool:
    """Whether `address` is one of this machine: only those can be bound."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def _refusal(addresses: list) -> str | None:
    """Why none of `addresses` takes a connection; None if one does."""
    reason = ""
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(5)
            try:
                probe.connect(address)
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                return None
    return reason
