"""The environment of a local instance: HAProxy stays on loopback, with ports of its own."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from serve_app.cli import local_ray as launch
from serve_app.cli.local_ray import held_port, held_window, keep_token_private, local_environment
from serve_app.ingress.connections import ADDRESS_BOUND, AddressBounds


def test_haproxys_ports_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy starts seconds after its ports are chosen; meanwhile no connection may be given one of them."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with local_environment(tmp_path):
        names = ("HAPROXY_STATS", "HAPROXY_METRICS", "FALLBACK_PROXY_HTTP")
        stats, metrics, fallback = (int(os.environ[f"RAY_SERVE_{name}_PORT"]) for name in names)
        for port in (stats, metrics):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        most = int(os.environ["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"])
        assert len({stats, metrics, fallback}) == 3 and most < min(stats, metrics, fallback) < most + 5


@pytest.mark.parametrize(("own", "of_address", "expected"), [(None, 512, 4096), (None, 7000, 8000), ("900", 512, 900)])
def test_one_address_has_room_for_its_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, of_address: int, expected: int
) -> None:
    """Beside others, and unless the user has set Ray's bound."""
    monkeypatch.setattr(os, "environ", dict(os.environ) | ({} if own is None else {"RAY_SERVE_HAPROXY_MAXCONN": own}))
    with local_environment(tmp_path, of_address):
        assert int(os.environ["RAY_SERVE_HAPROXY_MAXCONN"]) == expected
    assert f"fe_conn gt {expected * 7 // 8}" in (tmp_path / "frontend.rules").read_text()


@pytest.mark.parametrize(("use_haproxy", "bound"), [(True, 1000), (False, 7)])
def test_requests_of_one_address_are_bounded_where_their_addresses_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_haproxy: bool, bound: int
) -> None:
    """By HAProxy, behind which all have its address, or by Ray's own server."""
    monkeypatch.setattr(os, "environ", {**os.environ, ADDRESS_BOUND: "3"})
    counted: list[None] = []
    scope = {"headers": [], "client": ("192.0.2.1", 1)}
    with local_environment(tmp_path, 7, use_haproxy=use_haproxy), ExitStack() as under_way:
        addresses = AddressBounds()
        while len(counted) < 1000 and addresses.refusal(scope) is None:
            counted.append(under_way.enter_context(addresses.counted(scope)))
    assert len(counted) == bound
    assert (tmp_path / "frontend.rules").exists() == use_haproxy


def test_a_held_port_is_kept_for_one_listener() -> None:
    """Nobody connects to it or takes it by chance, and the intended server can listen on it.

    The kernel never assigns ports of this range.
    """
    with held_port() as port:
        assert launch.FIRST_PORT <= port < launch.LAST_PORT
        with socket.socket() as early:
            assert early.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
            server.settimeout(5)
            server.accept()[0].close()
    with socket.create_server(("127.0.0.1", port)):
        pass  # and it is free again


@pytest.fixture
def few_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Windows of two ports from the yielded one on, drawn in the order 0, 0, 1."""
    with held_window() as first:  # so that nobody else takes any of these meanwhile
        monkeypatch.setattr(launch, "PORT_WINDOW", 2)
        monkeypatch.setattr(launch, "FIRST_PORT", first)
        monkeypatch.setattr(launch, "LAST_PORT", first + 8)
        draws = iter([0, 0, 1])
        monkeypatch.setattr(launch.secrets, "randbelow", lambda _: next(draws))
        yield first


def test_a_window_of_ports_avoids_those_that_are_shared(few_windows: int) -> None:
    """A port with a listener that allows sharing (as an ingress does) is not free: its windows are not chosen."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", few_windows))
        listener.listen()
        with held_window() as first:
            assert first == few_windows + 2


def test_two_instances_have_windows_of_their_own(few_windows: int) -> None:
    """The second one avoids the first one's window even before the first one listens."""
    with held_window() as first, held_window() as second:
        assert (first, second) == (few_windows, few_windows + 2)


def test_rays_token_is_closed_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a token exists, others must not read it, because it opens Ray's ports. (docs: isolation)"""
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_token_private()
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.touch(0o644)
    keep_token_private()
    assert token.stat().st_mode & 0o777 == 0o600
