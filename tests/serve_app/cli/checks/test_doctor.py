"""What `warmpath doctor` finds of machine and installation, one cause at a time, and what it says to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from serve_app.cli import shadow
from serve_app.cli.checks import machine, software
from serve_app.cli.checks.catalog import CHECKS
from serve_app.cli.checks.finding import GIB, Case, Finding, problem, warning
from serve_app.cli.commands import doctor
from serve_app.cli.main import app


def by_subject(check: Callable[[Case], Iterator[Finding]]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in check(Case(place="here"))}


def test_every_check_has_somebody_who_asks_it() -> None:
    """And nobody is asked twice."""
    assert all(askers for _, askers in CHECKS)
    assert len({check for check, _ in CHECKS}) == len(CHECKS)


def test_a_problem_is_one_line_of_advice_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is shown and is none."""
    shown = [Finding("a", "ok", "fine"), warning("b", "odd", "look"), problem("c", "broken", "mend it")]

    def run(findings: list[Finding], *arguments: str) -> Any:
        monkeypatch.setattr(doctor, "findings", lambda asker, case: iter(findings))
        return CliRunner().invoke(app, ["doctor", *arguments])

    result = run(shown)
    assert result.exit_code == 1
    assert "PROBLEM  c: broken\n         -> mend it\n1 problem\n" in result.output
    assert run(shown[:2]).exit_code == 0
    document = json.loads(run(shown, "--json").output)
    assert document["ok"] is False
    assert document["findings"][2] == {"subject": "c", "state": "problem", "found": "broken", "advice": "mend it"}


def test_this_environment_is_as_pyproject_wants_it() -> None:
    """The tests run in an environment that `make` made."""
    checks = (software.installation, software.shadows, software.packages, software.vllm)
    findings = {subject: finding for check in checks for subject, finding in by_subject(check).items()}
    assert findings.keys() == {"warmpath", "python", "packages", "vllm"}
    assert all(finding.state == "ok" for finding in findings.values())
    assert "ray 2.60" in findings["packages"].found


@pytest.mark.parametrize(("needed", "words"), [("numpy<1", "is not in <1"), ("no-such-package>=2", "not installed")])
def test_a_package_out_of_its_range_is_told_with_the_command(needed: str, words: str) -> None:
    finding = software.package(Requirement(needed))
    assert finding is not None and finding.state == "problem"
    assert words in finding.found
    assert finding.advice == f"pip install '{needed}'"
    assert software.package(Requirement("numpy>=1")) is None


def test_what_is_not_installed_names_no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_distribution", lambda: None)
    assert by_subject(software.installation)["warmpath"].state == "problem"
    assert "packages" not in by_subject(software.packages)


@pytest.mark.parametrize("module", ["router.py", "serve_app/__init__.py"])
def test_a_module_with_one_of_our_names_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """By `doctor` where it lies in the directory of a start, and by any command that cannot be imported for it."""
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text("")
    monkeypatch.chdir(tmp_path)
    (finding,) = software.shadows(Case(place="here"))
    assert finding.found == f"{tmp_path / module} is imported in place of {shadow.CODE / finding.subject}"
    assert shadow.shadow(finding.subject, [str(shadow.CODE), str(tmp_path)]) is None, "ours is found first"


def test_an_import_that_a_stranger_spoils_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "router.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; from serve_app.cli.entry import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: Python imports {tmp_path / 'router.py'} in place of")


def test_too_little_room_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "default_cache_dir", lambda: tmp_path / "not" / "yet")
    usage = SimpleNamespace(total=100 * GIB, free=50 * GIB, used=50 * GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    assert by_subject(machine.disks)["model cache"].state == "ok"
    assert by_subject(machine.shared_memory)["shared memory"].state == "ok"
    usage.free = 3 * GIB
    full = by_subject(machine.disks)["model cache"]
    assert full.state == "problem" and "3.0 of 100.0 GiB" in full.found
    usage.free = 100 << 20
    assert "--shm-size" in by_subject(machine.shared_memory)["shared memory"].advice
    monkeypatch.setattr(machine, "memory_bytes", lambda: GIB)
    assert by_subject(machine.memory)["memory"].state == "problem"
    (tmp_path / "not").touch()
    blocked = by_subject(machine.disks)["model cache"]
    assert "is no directory" in blocked.found and "XDG_CACHE_HOME" in blocked.advice


def test_a_torch_that_cannot_be_imported_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TORCH", "raise ImportError('libcudart.so.12: cannot open')")
    assert "libcudart.so.12" in by_subject(machine.torch)["torch"].found
    monkeypatch.setattr(machine, "_TORCH", "")
    assert by_subject(machine.torch)["torch"].state == "problem"
    monkeypatch.setattr(machine, "_TORCH", "import time; time.sleep(600)")
    with monkeypatch.context() as brief:
        brief.setattr(machine, "_TORCH_WITHIN_S", 0.1)
        assert by_subject(machine.torch)["torch"].found == "does not answer within 0.1 s"
    answer = '{"version": "2.99", "cuda": null, "gpus": ["NVIDIA H100"]}'
    monkeypatch.setattr(machine, "_TORCH", f"print('''{answer}''')")
    assert by_subject(machine.torch)["torch"] == Finding("torch", "ok", "2.99 on NVIDIA H100")


def test_without_a_model_and_without_a_hub_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "constants", SimpleNamespace(HF_HUB_CACHE=str(tmp_path / "hf"), HF_HUB_OFFLINE=False))
    assert by_subject(machine.models)["models"].state == "ok"
    machine.constants.HF_HUB_OFFLINE = True
    assert by_subject(machine.models)["models"].state == "warning"
    (tmp_path / "warmpath" / "models" / "smollm2-x").mkdir(parents=True)
    models = by_subject(machine.models)["models"]
    assert models.state == "ok" and "default model is in" in models.found


def test_the_command_imports_neither_torch_nor_ray() -> None:
    """Where they are broken, it is what says so."""
    code = "import sys, serve_app.cli.main; print([name for name in ('torch', 'ray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
