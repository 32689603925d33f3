"""Where nodes meet: the form of the endpoint, and whether anybody is there."""

import socket

import pytest

from ac_recipes import meeting
from ac_recipes.errors import RunError, UsageError
from ac_recipes.meeting import host_and_port, reach


@pytest.fixture
def elsewhere(monkeypatch):
    """No address is one of this machine."""
    monkeypatch.setattr(meeting, "_is_here", lambda *_: False)


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [("node-0.cluster:29500", ("node-0.cluster", 29500)), ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535))],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint, found):
    assert host_and_port("--x", endpoint) == found


@pytest.mark.parametrize("endpoint", ["node0", "node0:", ":29500", "node0:29500:1", "a b:1", "http://node0:29500"])
def test_what_has_another_form_is_refused(endpoint):
    with pytest.raises(UsageError, match="^--x: '.*' is not HOST:PORT, such as node0:29500$"):
        host_and_port("--x", endpoint)


def test_a_node_that_listens_is_reached(elsewhere, listener):
    listener.listen()
    reach("--x", *listener.getsockname(), patience=0)


def test_a_node_that_does_not_is_named(elsewhere, listener):
    host, port = listener.getsockname()
    with pytest.raises(RunError, match=rf"^--x: cannot reach {host}:{port} in 0 seconds: Connection refused; start"):
        reach("--x", host, port, patience=0)


def test_on_the_node_where_all_meet_nobody_has_to_listen_yet(listener):
    reach("--x", *listener.getsockname(), patience=0)
