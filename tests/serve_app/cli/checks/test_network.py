"""An address nobody can listen on is a problem with its reason; an instance that runs is one for a start alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from serve_app.cli.checks import network
from serve_app.cli.checks.finding import Case, Finding
from serve_app.cli.local_ray import held_port
from serve_app.cli.processes import OWNER, Holder


def found(host: str, port: int, place: str = "start") -> Finding:
    (finding,) = network.address(Case(place=place, host=host, port=port))  # type: ignore[arg-type]
    return finding


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
    assert found(host, port).state == "problem"
    assert words in found(host, port).sentence


def test_a_free_port_is_fine() -> None:
    """Also one that is held for a listener to come."""
    with held_port() as port:
        assert (found("127.0.0.1", port).state, found("localhost", port).state) == ("ok", "ok")
    assert next(network.inner_ports(Case())).state == "ok"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("place", ["start", "here"])
def test_a_taken_port_says_by_whom(host: str, place: str) -> None:
    """With the process to stop."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = found(host, port, place)
    assert taken.state == "problem"
    assert re.search(rf"port {port} is taken by .* \(pid {os.getpid()}\): stop that", taken.sentence)


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        (Holder(7, "haproxy", True, 5), "another warmpath (pid 5): stop that"),
        (Holder(7, "haproxy", True, None), "haproxy (pid 7) that a killed warmpath left behind: run kill -9 7"),
        (None, "a process of another user"),
    ],
)
def test_our_own_are_told_from_others(monkeypatch: pytest.MonkeyPatch, holder: Holder | None, words: str) -> None:
    """A running instance is to be stopped as a whole; what one left behind can be killed; beside one all is well."""
    monkeypatch.setattr(network, "port_holder", lambda _: holder)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert words in found("127.0.0.1", port).sentence
        beside = found("127.0.0.1", port, "here")
    running = holder is not None and holder.supervisor is not None
    assert beside.state == ("ok" if running else "problem")
    assert ("(pid 5) serves at" in beside.found) == running


def test_nodes_of_ray_are_told_with_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And variables that lead to another one."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(command, env={**os.environ, OWNER: str(os.getpid())})
    others = subprocess.Popen(command)
    nodes = [psutil.Process(child.pid) for child in (ours, others)]
    for node in nodes:
        node.info = {"name": "raylet"}  # type: ignore[attr-defined]
    monkeypatch.setattr(network.psutil, "process_iter", lambda _: [*nodes, SimpleNamespace(info={"name": "sh"})])
    try:
        variable, first, second = network.ray(Case(place="here"))
    finally:
        for child in (ours, others):
            child.kill()
            child.wait()
    assert variable.advice.startswith("unset RAY_ADDRESS")
    assert (first.state, second.state) == ("ok", "ok")
    assert f"(pid {ours.pid}), that of warmpath (pid {os.getpid()})" in first.found
    assert "a cluster's" in second.found
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(network.psutil, "process_iter", lambda _: [])
    assert [finding.found for finding in network.ray(Case())] == ["no node runs"]
