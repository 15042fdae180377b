"""The compiled router: built by its command, taken only for these very sources; all router tests hold for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router import compiled
from router.compiled import MODULES, SWITCH, NotCompiled

ROOT = Path(__file__).parents[2]
WHERE = "import router, router.core; print(router.is_compiled, router.core.__file__)"


def run(cache: Path, *arguments: str, switch: str = "1") -> subprocess.CompletedProcess[str]:
    """Run this Python where ``cache`` is the user's cache directory."""
    environment = {**os.environ, SWITCH: switch, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory with a build made by ``warmpath compile``."""
    directory = tmp_path_factory.mktemp("cache")
    done = run(directory, "-c", "from serve_app.cli import main; main()", "compile")
    if done.returncode:
        pytest.skip(f"the router cannot be compiled here: {done.stderr.strip()[-300:]}")
    assert "compiled: " in done.stdout
    return directory


def test_it_is_taken_and_can_be_switched_off(cache: Path) -> None:
    taken = run(cache, "-c", WHERE).stdout.split()
    assert taken[0] == "True"
    assert taken[1].startswith(str(cache))
    assert run(cache, "-c", WHERE, switch="0").stdout.split() == ["False", str(ROOT / "router/core.py")]


def test_every_router_test_holds_for_it(cache: Path) -> None:
    """Policies, directory laws, loads, faults: the same tests, run over machine code."""
    flags = ["-q", "-x", "-p", "no:cacheprovider", "tests/router", "--deselect", "tests/router/test_compiled.py"]
    # The tests' own conftest runs the sources unless it is told otherwise.
    code = f"import os, sys, router, pytest; assert router.is_compiled; sys.exit(pytest.main({flags!r}))"
    done = run(cache, "-c", code)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout or "100%" in done.stdout


def test_other_sources_and_foreign_files_are_not_taken(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An edit makes a build stale; one that others may write is left alone; a broken one leaves the sources."""
    monkeypatch.setattr(compiled, "COMPILED", cache / "warmpath" / "compiled")
    monkeypatch.setenv(SWITCH, "1")
    built = compiled.directory()
    assert built.is_dir()
    assert {path.name.split(".")[0] for path in (built / "router").iterdir()} == set(MODULES)
    sources = shutil.copytree(ROOT / "router", tmp_path / "router", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compiled, "_SOURCES", sources)
    assert compiled.directory() == built
    (sources / "pull.py").write_text((sources / "pull.py").read_text() + "\n")
    assert not compiled.activate([])
    monkeypatch.setattr(compiled, "_SOURCES", ROOT / "router")
    (built / "router").chmod(0o770)
    path = ["somewhere"]
    assert not compiled.activate(path)
    assert path == ["somewhere"]
    (built / "router").chmod(0o700)
    (built / "0__mypyc.so").write_bytes(b"no library")
    (built / "0__mypyc.so").chmod(0o700)
    assert not compiled.activate(path)
    (built / "0__mypyc.so").unlink()


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "COMPILED", tmp_path / "compiled")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotCompiled, match=r"pip install 'warmpath\[compile\]'"):
        compiled.build()
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "COMPILED", tmp_path / "compiled")
    monkeypatch.setattr(compiled, "MODULES", ("no_such_module",))
    with pytest.raises(NotCompiled, match="mypyc needs gcc and Python's header files"):
        compiled.build()
    assert list((tmp_path / "compiled").iterdir()) == []
