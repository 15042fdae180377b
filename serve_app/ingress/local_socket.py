"""A Unix socket beside the port of a process that listens for HTTP, for the HAProxy of the same machine.

A message through it takes half of the CPU time that one through TCP on loopback does, on both sides. HAProxy has it in
place of the port once it is there (`serve_app/cli/local_ray.py`); whoever else asks comes by the port, as before.
"""

import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

SOCKETS = "WARMPATH_SOCKETS"
"""The environment variable for the sockets' folder, which only this user can enter; without it there are none."""

MOST_BYTES = 100
"""Of a socket's path; the system allows 107."""


def socket_of(folder: str, port: int) -> Path:
    """Return the socket beside a port."""
    return Path(folder) / f"{port}.sock"


def listen_beside_ports() -> None:
    """Let each server of this process that is given a listening TCP socket listen beside it. May be called again.

    Ray starts uvicorn with its own socket and has no option for more. uvicorn takes several, and closes all at its end.
    """
    import uvicorn  # not for those who only want a name of this module

    folder, serve = os.environ.get(SOCKETS, ""), uvicorn.Server.serve
    if folder and not hasattr(serve, "beside"):
        uvicorn.Server.serve = _serving(serve, folder)  # type: ignore[method-assign]


def _serving(serve: Callable[..., Awaitable[None]], folder: str) -> Any:
    async def both(server: Any, sockets: list[socket.socket] | None = None) -> None:
        if sockets and sockets[0].family in (socket.AF_INET, socket.AF_INET6):
            path = socket_of(folder, sockets[0].getsockname()[1])
            if len(os.fsencode(path)) <= MOST_BYTES:
                sockets = [*sockets, _bound(path)]
        await serve(server, sockets)

    both.beside = True  # type: ignore[attr-defined]
    return both


def _bound(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of a process that died
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    return made
