"""Bounds of connections in the process that listens for HTTP, with uvicorn as Ray starts it."""

import asyncio
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from ray.serve._private.http_util import _apply_middlewares
from ray.serve._private.utils import call_function_from_import_path

from serve_app.ingress import connections
from serve_app.ingress.connections import ADDRESS_BOUND, CLIENT_HEADERS, AddressBounds
from serve_app.ingress.local_socket import SOCKETS, socket_of
from tests.harness.eventually import eventually

PATIENCE_S = 60.0
LONG = 64 << 20
WAITING = 300


class Door:
    """A server with an application that answers after ``go``; ``left``: whether a long answer broke off."""

    def __init__(self, beside: Path | None) -> None:
        self.beside = beside
        self.go = threading.Event()
        self.left = threading.Event()
        self.stands = threading.Event()
        self.port = 0
        self.begun = self.rounds = 0

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        while scope["path"] == "/wait" and not self.go.is_set():  # noqa: ASYNC110 (another thread sets it)
            await asyncio.sleep(0.005)
        if scope["path"] == "/stand":  # the loop stands still, and its rounds are counted from then on
            self.stands.set()
            self.go.wait(PATIENCE_S)
            self._count(asyncio.get_running_loop())
        self.begun += scope["path"] == "/waited"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/long":
            for _ in range(LONG >> 16):
                await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
            if (await receive())["type"] == "http.disconnect":
                self.left.set()
        await send({"type": "http.response.body", "body": b"whole"})

    def _count(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.begun < WAITING:
            self.rounds += 1
            loop.call_soon(self._count, loop)

    def connected(self) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self.port, PATIENCE_S)
        if self.beside is None:
            connection.connect()
            return connection
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(PATIENCE_S)
        connection.sock.connect(str(socket_of(str(self.beside), self.port)))
        return connection

    def asked(self, path: str = "/", headers: dict[str, str] | None = None) -> HTTPResponse:
        connection = self.connected()
        connection.request("GET", path, headers=headers or {})
        return connection.getresponse()


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for sockets beside ports, for this test alone."""
    monkeypatch.setenv(SOCKETS, str(tmp_path))
    monkeypatch.setattr(uvicorn.Server, "serve", uvicorn.Server.serve)
    return tmp_path


@contextmanager
def opened(http: str, loop: str = "auto", beside: Path | None = None, port: int = 0) -> Iterator[Door]:
    door = Door(beside)
    app = _apply_middlewares(door.application, call_function_from_import_path(CLIENT_HEADERS))
    config = uvicorn.Config(lambda: app, factory=True, port=0, lifespan="off", log_config=None, http=http, loop=loop)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", port)) as listening:
        door.port = listening.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            # The guard begins with a first request.
            eventually(lambda: door.asked().read() == b"whole", PATIENCE_S, failures=(OSError,))
            yield door
        finally:
            door.go.set()
            server.should_exit = server.force_exit = True
            thread.join(PATIENCE_S)


@pytest.fixture(params=["httptools", "h11", "socket"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    for name, value in {"LOOK_S": 0.05, "HEADER_TIMEOUT_S": 0.5, "STALL_TIMEOUT_S": 0.5}.items():
        monkeypatch.setattr(connections, name, value)
    monkeypatch.setenv(ADDRESS_BOUND, "3")
    beside = request.getfixturevalue("sockets") if request.param == "socket" else None
    with opened(request.param if beside is None else "httptools", beside=beside) as made:
        yield made


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_headers_have_to_arrive_in_time(door: Door, first: bytes) -> None:
    """Sending slowly does not help: a byte does not extend the time, of a connection's first request or a later one."""
    with closing(door.connected()) as connection:
        connection.sock.sendall(first)
        while first and not connection.sock.recv(1000).endswith(b"0\r\n\r\n"):
            pass
        connection.sock.sendall(b"GET / HTTP/1.1\r\n")
        while not select.select([connection.sock], [], [], 0.1)[0]:
            connection.sock.sendall(b"X-A: 1\r\n")
        assert connection.sock.recv(100).startswith(b"HTTP/1.1 408")


def test_a_connection_without_a_request_ends(door: Door) -> None:
    with closing(door.connected()) as connection:
        assert connection.sock.recv(100).startswith(b"HTTP/1.1 408")


def test_a_request_that_waits_and_one_after_a_pause_are_answered(door: Door) -> None:
    """The bounds are for clients that send or read too slowly, not for a server that is slow, nor for idle ones."""
    with closing(door.connected()) as waiting, closing(door.connected()) as idle:
        waiting.request("GET", "/wait")
        idle.request("GET", "/")
        assert idle.getresponse().read() == b"whole"
        time.sleep(3 * connections.HEADER_TIMEOUT_S)
        door.go.set()
        assert waiting.getresponse().read() == b"whole"
        idle.request("GET", "/")
        assert idle.getresponse().read() == b"whole"


def test_a_client_that_reads_nothing_is_dropped(door: Door) -> None:
    with closing(door.connected()) as connection:
        connection.request("GET", "/long")
        assert door.left.wait(PATIENCE_S)


def test_a_client_that_reads_slowly_gets_all(door: Door) -> None:
    """It takes far longer than one that may read nothing."""
    with closing(door.connected()) as connection:
        connection.request("GET", "/long")
        answer, read = connection.getresponse(), 0
        ends_s = time.monotonic() + 6 * connections.STALL_TIMEOUT_S
        while time.monotonic() < ends_s:
            read += len(answer.read(1 << 16))
            time.sleep(0.05)
        assert read < LONG
        while part := answer.read(1 << 20):
            read += len(part)
        assert read == LONG + len(b"whole")


def test_headers_over_the_bound_are_refused(door: Door) -> None:
    answer = door.asked(headers={f"x-{number}": "y" * 30_000 for number in range(3)})
    assert (answer.status, answer.headers["connection"]) in (
        (431, "close"),
        (400, "close"),
    )  # h11 has a bound of its own
    assert door.asked(headers={"x-1": "y" * 30_000}).status == 200


def test_requests_over_an_address_bound_get_a_429(door: Door) -> None:
    """Only those under way count."""
    with ExitStack() as ending:
        waiting = [ending.enter_context(closing(door.connected())) for _ in range(3)]
        for connection in waiting:
            connection.request("GET", "/wait")
        while (answer := door.asked()).status != 429:
            time.sleep(0.01)
        assert answer.headers["retry-after"] == "1" and b"--max-connections-per-address" in answer.read()
        door.go.set()
        assert [connection.getresponse().read() for connection in waiting] == [b"whole"] * 3
        while door.asked().status != 200:
            time.sleep(0.01)


def test_connections_without_a_request_make_room(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the bound of all connections, idle ones are closed, others stay."""
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    with ExitStack() as ending:
        idle = [ending.enter_context(closing(door.connected())) for _ in range(8)]
        busy = ending.enter_context(closing(door.connected()))
        busy.request("GET", "/wait")
        left = list(idle)
        ends_s = time.monotonic() + PATIENCE_S
        while len(left) > 4 and time.monotonic() < ends_s:
            readable, _, _ = select.select([connection.sock for connection in left], [], [], 0.1)
            left = [connection for connection in left if connection.sock not in readable]
        assert len(left) <= 4
        door.go.set()
        assert busy.getresponse().read() == b"whole"


@pytest.mark.parametrize("place", ["port", "socket"])
def test_who_waited_while_the_loop_was_busy_is_accepted_at_once(place: str, sockets: Path) -> None:
    """uvloop accepts one connection a round; rounds are long when the loop is busy."""
    with opened("httptools", "uvloop", sockets if place == "socket" else None) as door, ExitStack() as ending:
        standing = ending.enter_context(closing(door.connected()))
        standing.request("GET", "/stand")
        assert door.stands.wait(PATIENCE_S)
        asked = [ending.enter_context(closing(door.connected())) for _ in range(WAITING)]
        for connection in asked:
            connection.request("GET", "/waited")
        door.go.set()
        assert all(connection.getresponse().read() == b"whole" for connection in asked)
        assert 0 < door.rounds < WAITING // 2, "a round for each"


def test_a_socket_of_a_dead_process_is_replaced(sockets: Path) -> None:
    """Its port is another process' now; both ways lead to that one."""
    with opened("httptools", beside=sockets) as door:
        path = socket_of(str(sockets), door.port)
        assert path.is_socket() and door.asked().read() == b"whole"
        door.beside = None
        assert door.asked().read() == b"whole"
    assert path.is_socket(), "as a process leaves it that was killed"
    with opened("httptools", beside=sockets, port=door.port) as another:
        assert another.asked().read() == b"whole"


def test_a_path_too_long_is_left_out(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port alone is listened on."""
    far = sockets / ("x" * 100)
    far.mkdir()
    monkeypatch.setenv(SOCKETS, str(far))
    with opened("httptools") as door:
        assert door.asked().read() == b"whole"
    assert not any(far.iterdir())


def test_a_server_that_was_busy_for_long_cuts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is that of looks: what clients have sent meanwhile is read between two of them."""
    monkeypatch.setattr(connections, "LOOK_S", 0.001)
    times: list[float] = []

    class Busy(connections.ConnectionGuard):
        def look(self, now_s: float) -> None:
            times.append(now_s)
            if len(times) == 3:
                raise asyncio.CancelledError
            time.sleep(20 * connections.LOOK_S)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Busy(()).run())
    assert times == [0.0, 0.001, 0.002]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
    ],
)
def test_a_network_of_64_bits_is_one_client(monkeypatch: pytest.MonkeyPatch, one: str, other: str, same: bool) -> None:
    monkeypatch.setenv(ADDRESS_BOUND, "1")
    addresses = AddressBounds()
    first, second = ({"headers": [], "client": (address, 1)} for address in (one, other))
    with addresses.counted(first):
        assert (addresses.refusal(second) is not None) == same
    assert addresses.refusal(first) is None
