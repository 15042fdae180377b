"""`python -m cluster.local`: it says where it answers and what runs, and Ctrl-C stops the cluster."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from cluster import local


def test_it_prints_where_it_answers_and_ctrl_c_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MagicMock(url="http://127.0.0.1:9", address="127.0.0.1:8")
    cluster.processes.return_value = [{"node": 1, "pid": 7, "kind": "Replica", "name": "x"}]
    made = MagicMock(return_value=cluster)
    monkeypatch.setattr(local, "LocalCluster", made)
    monkeypatch.setattr(local, "signal", MagicMock(pause=MagicMock(side_effect=KeyboardInterrupt)))
    result = CliRunner().invoke(local.app, ["--nodes", "2", "--replicas", "2"])
    assert result.exit_code == 0, result.output
    assert "curl http://127.0.0.1:9/v1/completions" in result.output
    assert "node 1  pid 7        Replica    x" in result.output
    (wanted,) = cluster.deploy.call_args.args
    assert (made.call_args.args, wanted["args"]["replicas"], wanted["args"]["engine"]) == ((2,), 2, "simulated")
    cluster.stop.assert_called_once_with()
