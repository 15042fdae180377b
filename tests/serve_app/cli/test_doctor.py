"""What `warmpath doctor` finds, one cause at a time, and what it says to do."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from serve_app.cli.commands import doctor
from serve_app.cli.doctor import machine, network, software
from serve_app.cli.doctor.finding import Finding, problem, warning
from serve_app.cli.doctor.models import models
from serve_app.cli.main import app

GIB = 1 << 30


def run(monkeypatch: pytest.MonkeyPatch, findings: list[Finding], *arguments: str) -> Any:
    monkeypatch.setattr(doctor, "findings", lambda host, port: iter(findings))
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_problem_is_one_line_of_advice_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is shown and is none."""
    found = [Finding("a", "ok", "fine"), warning("b", "odd", "look"), problem("c", "broken", "mend it")]
    result = run(monkeypatch, found)
    assert result.exit_code == 1
    assert "PROBLEM  c: broken\n         -> mend it\n" in result.output
    assert "1 problems" in result.output
    assert run(monkeypatch, found[:2]).exit_code == 0
    document = json.loads(run(monkeypatch, found, "--json").output)
    assert document["ok"] is False
    assert document["findings"][2] == {"subject": "c", "state": "problem", "found": "broken", "advice": "mend it"}


def test_this_environment_is_as_pyproject_wants_it() -> None:
    """The tests run in an environment that `make` made."""
    found = {finding.subject: finding for finding in software.software()}
    assert found.keys() >= {"warmpath", "python", "packages", "vllm"}
    assert all(finding.state != "problem" for finding in found.values())
    assert "ray 2.60" in found["packages"].found


@pytest.mark.parametrize(("wanted", "said"), [("numpy<1", "is not in <1"), ("no-such-package>=2", "not installed")])
def test_a_package_out_of_its_range_is_told_with_the_command(wanted: str, said: str) -> None:
    finding = software.package(Requirement(wanted))
    assert finding is not None and finding.state == "problem"
    assert said in finding.found
    assert finding.advice == f"pip install '{wanted}'"
    assert software.package(Requirement("numpy>=1")) is None


def test_a_port_that_is_taken_is_told_with_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        port_finding, inner = network.ports("127.0.0.1", port)
    assert port_finding.state == "problem" and str(port) in port_finding.found
    assert "--port" in port_finding.advice
    assert inner.state == "ok"
    assert next(network.ports("127.0.0.1", port)).state == "ok"


def test_ray_that_runs_or_left_its_logs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert [finding.found for finding in network.ray_state(tmp_path)] == ["no cluster runs"]
    with socket.socket() as gcs:
        gcs.bind(("127.0.0.1", 0))
        gcs.listen()
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        (tmp_path / "ray_current_cluster").write_text(address)
        assert address in next(network.ray_state(tmp_path)).found
    assert next(network.ray_state(tmp_path)).found.startswith("no cluster runs")
    (tmp_path / "session_1" / "logs").mkdir(parents=True)
    with (tmp_path / "session_1" / "logs" / "big").open("wb") as file:
        file.truncate(3 * GIB)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    states = {finding.subject: finding for finding in network.ray_state(tmp_path)}
    assert states["ray sessions"].state == "warning" and "3.0 GiB" in states["ray sessions"].found
    assert next(network.ray_state(tmp_path)).advice.startswith("unset RAY_ADDRESS")


def test_too_little_room_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.disk("models", tmp_path / "not" / "yet").state == "ok"
    usage = SimpleNamespace(total=100 * GIB, free=3 * GIB, used=97 * GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    full = machine.disk("models", tmp_path)
    assert full.state == "problem" and "3.0 of 100.0 GiB" in full.found
    usage.free = 100 << 20
    found = {finding.subject: finding for finding in machine.room({})}
    assert "--shm-size" in found["shared memory"].advice
    monkeypatch.setattr(machine, "memory_bytes", lambda: GIB)
    assert {finding.subject: finding.state for finding in machine.room({})}["memory"] == "problem"
    file = tmp_path / "file"
    file.touch()
    assert machine.disk("models", file).state == "problem"


def test_a_torch_that_cannot_be_imported_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TORCH", "raise ImportError('libcudart.so.12: cannot open')")
    assert "libcudart.so.12" in machine.device().found
    monkeypatch.setattr(machine, "_TORCH", "")
    assert machine.device().state == "problem"
    said = '{"version": "2.99", "cuda": null, "gpus": ["NVIDIA H100"]}'
    monkeypatch.setattr(machine, "_TORCH", f"print('''{said}''')")
    assert machine.device() == Finding("torch", "ok", "2.99 on NVIDIA H100")


def test_without_a_model_and_without_a_hub_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert models().state == "ok"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models().state == "warning"
    (tmp_path / "warmpath" / "models" / "smollm2-x").mkdir(parents=True)
    assert models().state == "ok" and "default model is in" in models().found


def test_the_command_imports_neither_torch_nor_ray() -> None:
    """Where they are broken, it is what says so."""
    code = (
        "import sys, serve_app.cli.commands.doctor; print([name for name in ('torch', 'ray') if name in sys.modules])"
    )
    done = machine.subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
