"""Who is in the way: of the port, of ports for ingresses, a Ray that runs, variables that mislead it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import psutil

from serve_app.cli.checks.finding import Case, Finding, problem, warning
from serve_app.cli.local_ray import FIRST_PORT, LAST_PORT, held_window
from serve_app.cli.processes import Holder, holder_of, port_holder

_OTHER = "or choose another with --port"


def address(case: Case) -> Iterator[Finding]:
    """Whether an instance could listen; one that runs already is in the way of a start alone."""
    host, port = case.host, case.port
    if not 1 <= port <= 65535:
        yield problem("port", f"there is no port {port}", "ports are 1 to 65535")
        return
    try:
        families = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        found = f"there is no address {host!r} ({getattr(error, 'strerror', error)})"
        yield problem("host", found, "give one of this machine with --host")
        return
    # Of a name with both kinds of address servers take the IPv4 one.
    family, kind, protocol, _, where = min(families, key=lambda entry: entry[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            yield _not_bound(case, error)
        else:
            yield Finding("port", "ok", f"{host}:{port} is free")


def _not_bound(case: Case, error: OSError) -> Finding:
    if error.errno == errno.EADDRNOTAVAIL:
        found = f"no interface of this machine has the address {case.host}"
        return problem("host", found, "use 127.0.0.1, or 0.0.0.0 for all of them")
    if error.errno == errno.EACCES:
        return problem("port", f"port {case.port} is for root alone", "choose one above 1023 with --port")
    if error.errno != errno.EADDRINUSE:
        return problem("port", f"cannot listen on {case.host}:{case.port} ({error.strerror})", "give another --host")
    return _taken(case, port_holder(case.port))


def _taken(case: Case, holder: Holder | None) -> Finding:
    taken = f"port {case.port} is taken by"
    if holder is None:
        return problem("port", f"{taken} a process of another user", f"stop that, {_OTHER}")
    if holder.supervisor is not None:
        if case.place != "start":
            return Finding("port", "ok", f"warmpath (pid {holder.supervisor}) serves at {case.host}:{case.port}")
        return problem("port", f"{taken} another warmpath (pid {holder.supervisor})", f"stop that, {_OTHER}")
    who = f"{taken} {holder.name} (pid {holder.pid})"
    if holder.ours:
        return problem("port", f"{who} that a killed warmpath left behind", f"run kill -9 {holder.pid}, {_OTHER}")
    return problem("port", who, f"stop that, {_OTHER}")


def inner_ports(case: Case) -> Iterator[Finding]:
    """Whether a row of ports for ingresses is free."""
    try:
        with held_window():
            yield Finding("inner ports", "ok", f"enough are free between {FIRST_PORT} and {LAST_PORT}")
    except RuntimeError as error:
        yield problem("inner ports", str(error))


def ray(case: Case) -> Iterator[Finding]:
    """Which nodes of Ray run here, and whether variables point to another cluster."""
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        if name in os.environ:
            yield warning("ray", f"{name}={os.environ[name]} is set", f"unset {name}, unless it is meant")
    nodes = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "raylet"]
    for node in nodes:
        supervisor = None
        with suppress(psutil.Error):  # it has ended, or is another user's
            supervisor = holder_of(node).supervisor
        whose = f"that of warmpath (pid {supervisor})" if supervisor else "a cluster's; `warmpath serve` starts its own"
        yield Finding("ray", "ok", f"a node runs (pid {node.pid}), {whose}")
    if not nodes:
        yield Finding("ray", "ok", "no node runs")
