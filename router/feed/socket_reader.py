"""Reads a ZeroMQ socket from an asyncio loop, without a task: its messages go to a function as soon as they are there.

pyzmq's own sockets for asyncio make a future and a handful of objects for each message; with several for each request
of a router that is a twentieth of all its work.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence

import zmq


class SocketReader:
    """One socket, which it owns. Used from one loop.

    ``take`` gets the messages of a turn: at most ``at_once``, none after one of more than ``large_bytes``. It may close
    the reader, and must not raise.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        take: Callable[[Sequence[bytes]], None],
        at_once: int,
        large_bytes: int = sys.maxsize,
    ) -> None:
        self._socket = socket
        self._take = take
        self._at_once = at_once
        self._large_bytes = large_bytes
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self._read)

    def send(self, message: bytes) -> None:
        """Send a message at once. Raises zmq.Again if there is no room for it, or no peer, and zmq.ZMQError."""
        try:
            self._socket.send(message, zmq.NOBLOCK)
        finally:  # a call may take the sign of what has come meanwhile
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Read no more, and drop what is unsent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(0)

    def _read(self) -> None:
        """Read a turn's messages. The socket signals only the first one until all were read."""
        if self._socket.closed:
            return
        messages: list[bytes] = []
        try:
            while len(messages) < self._at_once:
                messages.append(self._socket.recv(zmq.NOBLOCK))
                if len(messages[-1]) > self._large_bytes:
                    break
            self._loop.call_soon(self._read)
        except zmq.Again:
            pass
        if messages:
            self._take(messages)
