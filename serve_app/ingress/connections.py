"""Bounds of the connections of the process that listens for HTTP: uvicorn has none for headers and for slow readers.

An application sees a connection only with its first whole request. From that it finds uvicorn's others.
"""

import asyncio
import fcntl
import json
import os
import socket
import stat
import struct
import termios
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

from serve_app.api.openai.response import openai_error
from serve_app.errors import LimitReason, RateLimited, RequestTimeout, RequestTooLarge, WarmpathError
from serve_app.ingress.local_socket import SOCKETS, socket_of

HEADER_TIMEOUT_S = 10.0
"""For the headers of a request; uvicorn's own timer (Ray's `keep_alive_timeout_s`) ends connections between two."""
STALL_TIMEOUT_S = 60.0
"""For a client that reads nothing of what was sent to it."""
MAX_HEADER_BYTES = 64 << 10
MAX_CONNECTIONS = 4096
"""From here on, connections without a request are closed, those without one for over a second."""
LOOK_S = 1.0
ACCEPTED_AT_ONCE = 64
"""Connections that one request accepts: each takes a tenth of a millisecond."""
CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Ray's environment variable for what it puts around all applications, in every process that listens for HTTP."""
CLIENT_HEADERS = "serve_app.ingress.client_headers:middlewares"
"""Its value here. Only the name, because the module imports Ray."""
ADDRESS_BOUND = "WARMPATH_MAX_CONNECTIONS_PER_ADDRESS"
"""The environment variable for the requests in flight of one address; without it there is no bound.

Behind a proxy every client has the proxy's address: behind Ray's HAProxy there is no bound here.
"""

_LATE = json.dumps(openai_error(RequestTimeout("The request did not arrive in time; send it again."), "").body).encode()
_LATE_HEAD = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "


class HeadersTooLarge(RequestTooLarge):
    """The headers are over ``MAX_HEADER_BYTES``."""

    status = 431
    code = "headers_too_large"


class ConnectionGuard:
    """Ends connections over a bound. ``connections``: a server's protocols (of uvicorn), as they are at each look."""

    def __init__(self, connections: Collection[Any]) -> None:
        self._connections = connections
        self._waiting: dict[Any, float] = {}
        self._unsent: dict[Any, tuple[tuple[int, int], float]] = {}

    async def run(self) -> None:
        """Look at all connections from time to time."""
        # Looks are counted, not seconds: after a busy time, what clients have sent meanwhile is read only then.
        looks = 0
        while True:
            self.look(looks * LOOK_S)
            await asyncio.sleep(LOOK_S)
            looks += 1

    def look(self, now_s: float) -> None:
        """End the connections over a bound. ``now_s``: the time of looking so far."""
        waiting, unsent, idle = self._waiting, self._unsent, []
        self._waiting, self._unsent = {}, {}
        for protocol in list(self._connections):
            if not hasattr(protocol, "cycle"):  # a WebSocket, of another application
                continue
            transport, cycle = protocol.transport, protocol.cycle
            if left := _unsent(transport):
                before, since_s = unsent.get(protocol, (left, now_s))
                self._unsent[protocol] = left, since_s if before == left else now_s
                if before == left and now_s - since_s >= STALL_TIMEOUT_S:
                    _reset(transport)
            elif (cycle is None or cycle.response_complete) and not transport.is_closing():
                if protocol.timeout_keep_alive_task is not None:
                    idle.append(protocol)
                    continue
                since_s = self._waiting[protocol] = waiting.get(protocol, now_s)
                if now_s - since_s >= HEADER_TIMEOUT_S or header_bytes(protocol.headers or ()) > MAX_HEADER_BYTES:
                    transport.write(b"%b%d\r\n\r\n%b" % (_LATE_HEAD, len(_LATE), _LATE))
                    transport.close()
                elif now_s > since_s:
                    idle.append(protocol)
        for protocol in idle[: max(0, len(self._connections) - MAX_CONNECTIONS)]:
            protocol.transport.close()


class ListeningSocket:
    """A listening socket of this process. ``protocol``: one of its connections (of uvicorn); ``descriptor``: its own.

    uvloop accepts one connection each time that its loop comes round. While a burst of requests keeps the loop busy
    for a tenth of a second, that is ten a second: hundreds wait, whoever they are; `/health` waited for ten seconds.
    """

    def __init__(self, protocol: Any, descriptor: int) -> None:
        kind, state = type(protocol), (protocol.config, protocol.server_state, protocol.app_state)
        self._make = lambda: kind(*state, _loop=asyncio.get_running_loop())
        self._ssl = protocol.config.ssl
        self._descriptor, self._inode = descriptor, os.fstat(descriptor).st_ino
        self._accepted: set[asyncio.Task[None]] = set()

    def accept_waiting(self) -> None:
        """Accept the connections that wait, at most ``ACCEPTED_AT_ONCE``; called with each request."""
        with suppress(OSError):
            if os.fstat(self._descriptor).st_ino != self._inode:  # closed, and the number is another file's
                return
            listening = socket.socket(fileno=self._descriptor)
            try:
                listening.setblocking(False)
                for _ in range(ACCEPTED_AT_ONCE):
                    task = asyncio.ensure_future(self._begin(listening.accept()[0]))
                    self._accepted.add(task)
                    task.add_done_callback(self._accepted.discard)
            finally:
                listening.detach()

    async def _begin(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, accepted, ssl=self._ssl)
        except OSError:  # the client has left
            accepted.close()


class AddressBounds:
    """Requests in flight by address, for IPv6 by network of 64 bits: one client has all its addresses."""

    def __init__(self) -> None:
        most, proxied = os.environ.get(ADDRESS_BOUND, ""), os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
        self._most = int(most) if most.isdecimal() and not proxied else 0
        self._busy: Counter[str] = Counter()

    def refusal(self, scope: Mapping[str, Any]) -> WarmpathError | None:
        """Return the refusal of a request over a bound."""
        if header_bytes(scope["headers"]) > MAX_HEADER_BYTES:
            return HeadersTooLarge(f"The headers are over the limit of {MAX_HEADER_BYTES} bytes; send fewer.")
        if self._most and self._busy[_network(scope)] >= self._most:
            return too_many(self._most)
        return None

    def counted(self, scope: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Count a request while it runs."""
        return self._count(_network(scope)) if self._most else nullcontext()

    @contextmanager
    def _count(self, network: str) -> Iterator[None]:
        self._busy[network] += 1
        try:
            yield
        finally:
            self._busy[network] -= 1
            if not self._busy[network]:
                del self._busy[network]


def too_many(most: int) -> RateLimited:
    """Return the refusal of a request over the bound of its address."""
    return RateLimited(
        f"Your address has over {most} requests in flight; wait for some, or start the server with a larger "
        "--max-connections-per-address.",
        code="too_many_connections",
        retry_after_s=1,
        reason=LimitReason("port", "max_connections_per_address", most=most),
    )


def _network(scope: Mapping[str, Any]) -> str:
    address = (scope.get("client") or ("",))[0]
    with suppress(ValueError):
        if isinstance(ip := ip_address(address), IPv6Address) and ip.ipv4_mapped is None:
            return str(int(ip) >> 64)
    return str(address)


def guard_of(send: Any) -> ConnectionGuard | None:
    """Return a guard of all connections of the server of ``send``, None unless that is uvicorn's."""
    with suppress(AttributeError):
        return ConnectionGuard(send.__self__.transport.get_protocol().connections)
    return None


def listeners_of(send: Any) -> list[ListeningSocket]:
    """Return the sockets that the server of ``send`` listens on, none unless it is uvicorn on uvloop."""
    if "uvloop" not in type(asyncio.get_running_loop()).__module__:
        return []
    with suppress(AttributeError):
        protocol = send.__self__.transport.get_protocol()
        name = protocol.transport.get_extra_info("sockname")
        port = int(Path(name).stem) if isinstance(name, str) else name[1]
        return [ListeningSocket(protocol, descriptor) for descriptor in _listening(port)]
    return []


def _listening(port: int) -> Iterator[int]:
    """Yield the descriptors of this process that listen on a port, or on the socket beside it."""
    beside = str(socket_of(os.environ.get(SOCKETS, ""), port))
    for file in Path("/dev/fd").iterdir():
        descriptor = int(file.name)
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                inet = copy.family in (socket.AF_INET, socket.AF_INET6)
                if listens and (copy.getsockname()[1] == port if inet else copy.getsockname() == beside):
                    yield descriptor


def header_bytes(headers: Collection[tuple[bytes, bytes]]) -> int:
    """Return the size of a request's headers."""
    return sum(len(name) + len(value) for name, value in headers)


def _reset(transport: Any) -> None:
    """End a connection at once, with what the kernel holds for it: after a mere close it would wait for the client."""
    with suppress(OSError, AttributeError):
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


def _unsent(transport: Any) -> tuple[int, int] | None:
    """Return the bytes of an answer here and in the kernel that the client has not confirmed, None without any here."""
    here = transport.get_write_buffer_size()
    if not here:
        return None
    with suppress(OSError, AttributeError):
        # Without the kernel's part, a slow client would seem to stand still: the kernel takes large parts at a time.
        waiting = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        return here, struct.unpack("i", waiting)[0]
    return here, 0
