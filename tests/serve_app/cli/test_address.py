"""An address nobody can listen on is refused with its reason."""

from __future__ import annotations

import os
import socket

import pytest

from serve_app.cli import address
from serve_app.cli.address import BadAddress, check_address
from serve_app.cli.local_ray import held_port
from serve_app.cli.processes import Holder


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 0, "ports are 1 to 65535"),
        ("127.0.0.1", 99999, "ports are 1 to 65535"),
        ("203.0.113.7", 18001, "no interface of this machine has the address 203.0.113.7"),
        ("no such host", 18001, "there is no address 'no such host'"),
        ("x" * 300, 18001, "there is no address"),
    ],
)
def test_a_mistake_has_its_reason(host: str, port: int, words: str) -> None:
    """A port that is none, an address of another machine, a name that leads nowhere."""
    with pytest.raises(BadAddress, match=words):
        check_address(host, port)


def test_a_free_port_is_fine() -> None:
    """Also one that is held for a listener to come."""
    with held_port() as port:
        check_address("127.0.0.1", port)
        check_address("localhost", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_says_by_whom(host: str) -> None:
    """With the process to stop."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(BadAddress, match=rf"port {port} is taken by .* \(pid {os.getpid()}\): stop that"):
            check_address(host, port)


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        (Holder(7, "haproxy", True, 5), "another warmpath (pid 5)"),
        (Holder(7, "haproxy", True, None), "haproxy (pid 7) that a killed warmpath left behind: run kill -9 7"),
        (None, "a process of another user"),
    ],
)
def test_our_own_are_told_from_others(monkeypatch: pytest.MonkeyPatch, holder: Holder | None, words: str) -> None:
    """A running instance is to be stopped as a whole; what one left behind can be killed."""
    monkeypatch.setattr(address, "port_holder", lambda _: holder)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(BadAddress) as error:
        check_address("127.0.0.1", server.getsockname()[1])
    assert words in str(error.value)
