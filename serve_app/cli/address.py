"""Whether an address can be listened on; where not, one sentence that says why and what to do."""

from __future__ import annotations

import errno
import socket

from serve_app.cli.processes import Holder, port_holder


class BadAddress(ValueError):
    """Nothing can listen there; the message says what to change."""


def check_address(host: str, port: int) -> None:
    """Raise BadAddress where an instance could not listen on ``host:port``."""
    if not 1 <= port <= 65535:
        raise BadAddress(f"there is no port {port}: ports are 1 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadAddress(f"there is no address {host!r}: {getattr(error, 'strerror', error)}") from None
    # Of a name with both kinds of address servers take the IPv4 one.
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise BadAddress(_reason(host, port, error)) from None


def _reason(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return _taken(port, port_holder(port))
    if error.errno == errno.EADDRNOTAVAIL:
        return f"no interface of this machine has the address {host}: use 127.0.0.1, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return f"port {port} is for root alone: choose one above 1023 with --port"
    return f"cannot listen on {host}:{port}: {error.strerror}"


def _taken(port: int, holder: Holder | None) -> str:
    other = "or choose another with --port"
    if holder is None:
        return f"port {port} is taken by a process of another user: stop that, {other}"
    if holder.supervisor is not None:
        return f"port {port} is taken by another warmpath (pid {holder.supervisor}): stop that, {other}"
    if holder.ours:
        what = f"{holder.name} (pid {holder.pid}) that a killed warmpath left behind"
        return f"port {port} is taken by {what}: run kill -9 {holder.pid}, {other}"
    return f"port {port} is taken by {holder.name} (pid {holder.pid}): stop that, {other}"
