"""`python -m benchmarks NAME`: every benchmark has a name, and every name a benchmark."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks

ROOT = Path(benchmarks.__file__).parent
HELPED = ("simulate", "flooding", "admission", "replay", "autoscale", "pull", "hostile")
"""Those whose modules are imported in a second or two."""


def guarded_mains() -> set[str]:
    """Return the modules below ``benchmarks`` that run as programs and define what they run."""
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        guards = [node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
        if guards and any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return found


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT.parent, capture_output=True, text=True, check=False
    )


def test_the_table_names_every_benchmark_and_nothing_else() -> None:
    """Peers are measured by the benchmarks, and are none themselves."""
    programs = {module for module in guarded_mains() if not module.startswith(("peers.", "__main__"))}
    assert sorted(benchmarks.MODULES.values()) == sorted(programs)


@pytest.mark.parametrize("name", HELPED)
def test_flags_are_told(name: str) -> None:
    said = run(name, "--help")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith(f"usage: benchmarks {name} ")
    assert "--json" in said.stdout


@pytest.mark.parametrize(("arguments", "status"), [(["nonesuch"], 2), ([], 0), (["--help"], 0)])
def test_without_a_known_name_the_list_is_told(arguments: list[str], status: int) -> None:
    """Each with its purpose; a wrong name is an error."""
    said = run(*arguments)
    assert said.returncode == status
    assert ("there is no benchmark 'nonesuch'" in said.stderr) == (status == 2)
    for name in benchmarks.MODULES:
        assert f"\n  {name} " in said.stderr
    assert "hit rate of routing policies" in said.stderr
