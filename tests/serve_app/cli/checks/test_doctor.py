"""Findings of `warmpath doctor` about machine and installation, one cause at a time, and its advice."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from serve_app.cli import shadow
from serve_app.cli.checks import machine
from serve_app.cli.checks.finding import Finding, Look, problem
from serve_app.cli.checks.machine import GIB
from serve_app.cli.local_ray import held_port
from serve_app.cli.main import app
from serve_app.cli.processes import Holder
from serve_app.config.engine import EngineTraits
from tests.harness.programs import programs_here

HERE = Look()


def address(host: str, port: int, *, start: bool = True) -> Finding:
    [finding] = machine.address(Look("start" if start else "here", listens=(host, port)))
    return finding


def torch() -> Finding:
    [finding] = machine.torch(HERE)
    return finding


def by_subject(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_a_problem_is_one_line_of_advice_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [Finding("a", "fine"), Finding("b", "odd", "look", "warning"), problem("c", "broken", "mend it")]

    def run(findings: list[Finding], *arguments: str) -> Any:
        monkeypatch.setattr("serve_app.cli.checks.run.findings", lambda *_: iter(findings))
        return CliRunner().invoke(app, ["doctor", *arguments])

    result = run(shown)
    assert result.exit_code == 1
    assert "warning  b: odd\n         -> look\nPROBLEM  c: broken\n         -> mend it\n1 problem\n" in result.output
    assert run(shown[:2]).exit_code == 0
    document = json.loads(run(shown, "--json").output)
    assert document["ok"] is False
    assert document["findings"][2] == {"subject": "c", "state": "problem", "found": "broken", "advice": "mend it"}


def test_each_model_of_a_settings_file_is_looked_at_under_its_name(tmp_path: Path) -> None:
    """A directory that is missing is a problem of the entry that names it; the other one is fine."""
    file = tmp_path / "models.yaml"
    bad = {"served_model_name": "bad", "model": f"{tmp_path}/none"}
    file.write_text(json.dumps({"model": "demo", "engine": "simulated", "models": [{}, bad]}))
    with held_port() as port, programs_here():
        result = CliRunner().invoke(app, ["doctor", "--json", "--config", str(file), "--port", str(port)])
    assert result.exit_code == 1
    told = [row for row in json.loads(result.output)["findings"] if row["subject"].startswith("models")]
    assert {row["subject"] for row in told if row["state"] == "problem"} >= {"models.1.model"}
    assert all(row["found"].startswith("bad: ") and f"{tmp_path}/none" in row["found"] for row in told)
    file.write_text(json.dumps({"models": [{}, {}]}))
    twice = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert twice.exit_code == 2 and "given twice" in twice.output


def test_this_environment_is_as_pyproject_wants_it() -> None:
    findings = by_subject((*machine.installation(HERE), *machine.shadows(HERE)))
    assert findings.keys() == {"warmpath", "python", "packages", "vllm"}
    assert all(finding.state == "ok" for finding in findings.values())
    assert "ray 2.60" in findings["packages"].found


def test_what_the_installed_engine_does_not_allow_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A capability that is off is a warning; an engine that mixes tenants' caches, or cannot be tried, a problem."""
    monkeypatch.setattr(machine, "ENGINES", {"lib": EngineTraits("", frozenset(), tried="tried_lib")})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    whole = {"version": "1.2", "off": [], "wrong": "", "on": ["shares", "turns"]}
    for told, rows in (
        (whole, [("ok", "1.2 allows shares, turns")]),
        (
            {**whole, "off": ["turns: in order (no queue)"]},
            [("warning", "1.2 goes without turns: in order (no queue)")],
        ),
        ({**whole, "wrong": "no salt"}, [("problem", "1.2 does not keep tenants' caches apart: no salt")]),
        (None, [("problem", "cannot be tried")]),
    ):
        (tmp_path / "tried_lib.py").write_text(f"print('a log line')\ndef found(): return {told or 'unknown'}")
        found = list(machine.engines(HERE))
        assert [(finding.state, finding.found) for finding in found] == rows
        assert {finding.subject for finding in found} == {"lib"}


@pytest.mark.parametrize(("needed", "words"), [("numpy<1", "is not in <1"), ("no-such-package>=2", "not installed")])
def test_a_package_out_of_its_range_is_told_with_the_command(needed: str, words: str) -> None:
    finding = machine.package(Requirement(needed))
    assert finding is not None and finding.state == "problem"
    assert words in finding.found
    assert finding.advice == f"pip install '{needed}'"
    assert machine.package(Requirement("numpy>=1")) is None


def test_without_an_installation_no_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    [finding] = machine.installation(HERE)
    assert (finding.subject, finding.state) == ("warmpath", "problem")


@pytest.mark.parametrize("module", ["router.py", "serve_app/__init__.py"])
def test_a_module_with_one_of_our_names_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """`doctor` reports it in the working directory, and so does any command that fails to import because of it."""
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text("")
    monkeypatch.chdir(tmp_path)
    (finding,) = machine.shadows(HERE)
    assert finding.found == f"{tmp_path / module} is imported in place of {shadow.CODE / finding.subject}"
    assert shadow.shadow(finding.subject, [str(shadow.CODE), str(tmp_path)]) is None, "ours is found first"


def test_an_import_that_a_stranger_spoils_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "router.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; from serve_app.cli.entry import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: Python imports {tmp_path / 'router.py'} in place of")


def test_the_command_imports_neither_torch_nor_ray() -> None:
    """If they are broken, this command must report it."""
    code = "import sys, serve_app.cli.main; print([name for name in ('torch', 'ray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_too_little_room_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "default_cache_dir", lambda: tmp_path / "not" / "yet")
    usage = SimpleNamespace(total=100 * GIB, free=50 * GIB, used=50 * GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    found = by_subject(machine.room(HERE))
    assert (found["model cache"].state, found["shared memory"].state) == ("ok", "ok")
    usage.free = 3 * GIB
    full = by_subject(machine.room(HERE))["model cache"]
    assert full.state == "problem" and "3.0 of 100.0 GiB" in full.found
    usage.free = 100 << 20
    monkeypatch.setattr(machine, "memory_bytes", lambda: GIB)
    (tmp_path / "not").touch()
    found = by_subject(machine.room(HERE))
    assert "--shm-size" in found["shared memory"].advice
    assert found["memory"].state == "problem"
    blocked = found["model cache"]
    assert "is no directory" in blocked.found and "XDG_CACHE_HOME" in blocked.advice


def test_a_torch_that_cannot_be_imported_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TORCH", "raise ImportError('libcudart.so.12: cannot open')")
    assert "libcudart.so.12" in torch().found
    monkeypatch.setattr(machine, "_TORCH", "")
    assert torch().state == "problem"
    monkeypatch.setattr(machine, "_TORCH", "import time; time.sleep(600)")
    with monkeypatch.context() as brief:
        brief.setattr(machine, "_TORCH_WITHIN_S", 0.1)
        assert torch().found == "does not answer within 0.1 s"
    answer = '{"version": "2.99", "cuda": null, "gpus": ["NVIDIA H100"]}'
    monkeypatch.setattr(machine, "_TORCH", f"print('''{answer}''')")
    assert torch() == Finding("torch", "2.99 on NVIDIA H100")


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 0, "there is no port 0"),
        ("127.0.0.1", 99999, "there is no port 99999"),
        ("203.0.113.7", 18001, "no interface of this machine has the address 203.0.113.7"),
        ("no such host", 18001, "there is no address 'no such host'"),
        ("x" * 300, 18001, "there is no address"),
    ],
)
def test_an_address_that_is_none_has_its_reason(host: str, port: int, words: str) -> None:
    finding = address(host, port)
    assert finding.state == "problem"
    assert words in finding.found


def test_a_free_port_is_fine() -> None:
    with held_port() as port:
        assert (address("127.0.0.1", port).state, address("localhost", port).state) == ("ok", "ok")


@pytest.mark.parametrize(("host", "start"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_taken_port_says_by_whom(host: str, start: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = address(host, port, start=start)
    assert re.fullmatch(rf"port {port} is taken by .* \(pid {os.getpid()}\)", taken.found)
    assert (taken.state, taken.advice) == ("problem", "stop that, or choose another with --port")


@pytest.mark.parametrize(
    ("holder", "found", "advice"),
    [
        (Holder(7, "haproxy", True, 5), "another warmpath (pid 5)", "stop that"),
        (Holder(7, "haproxy", True, None), "haproxy (pid 7) that a killed warmpath left behind", "run kill -9 7"),
        (None, "a process of another user", "stop that"),
    ],
)
def test_our_own_are_told_from_others(
    monkeypatch: pytest.MonkeyPatch, holder: Holder | None, found: str, advice: str
) -> None:
    """A running instance is stopped as a whole; a leftover process is killed; beside an instance all is well."""
    monkeypatch.setattr(machine, "port_holder", lambda _: holder)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken, beside = address("127.0.0.1", port), address("127.0.0.1", port, start=False)
    assert found in taken.found and advice in taken.advice
    running = holder is not None and holder.supervisor is not None
    assert beside.state == ("ok" if running else "problem")
    assert ("(pid 5) serves at" in beside.found) == running
