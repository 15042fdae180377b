"""`python -m cluster.local`: it says where it answers and what runs, and Ctrl-C stops the cluster."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import local


class FakeCluster:
    """Stands in for a cluster; notes what was done to it."""

    url, address = "http://127.0.0.1:9", "127.0.0.1:8"

    def __init__(self, nodes: int, port: int | None) -> None:
        self.done: list[Any] = [nodes]
        CLUSTERS.append(self)

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def deploy(self, wanted: dict[str, Any]) -> None:
        self.done.append(wanted["args"])

    def processes(self) -> list[dict[str, Any]]:
        return [{"node": 1, "pid": 7, "kind": "Replica", "name": "x"}]

    def stop(self) -> None:
        self.done.append("stopped")


CLUSTERS: list[FakeCluster] = []


def interrupted() -> None:
    raise KeyboardInterrupt


def test_it_prints_where_it_answers_and_ctrl_c_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LocalCluster", FakeCluster)
    monkeypatch.setattr(local.signal, "pause", interrupted)
    monkeypatch.setattr(local.signal, "signal", lambda *_: None)
    result = CliRunner().invoke(local.app, ["--nodes", "2", "--replicas", "2"])
    assert result.exit_code == 0, result.output
    assert "curl http://127.0.0.1:9/v1/completions" in result.output
    assert "node 1  pid 7        Replica    x" in result.output
    done = CLUSTERS[-1].done
    assert (done[0], done[1]["replicas"], done[1]["engine"], done[-1]) == (2, 2, "simulated", "stopped")
