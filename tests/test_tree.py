"""`make lint` refuses what breaks in a fresh clone, and the name of another project on PyPI."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = runpy.run_path(str(ROOT / ".ci/check_tree.py"))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with one plain file."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "fine.md").write_text("pip install . && pip install warmpath-serve; warmpath serve\n")
    add(tmp_path)
    return tmp_path


def add(clone: Path, *flags: str) -> list[str]:
    subprocess.run(["git", "add", "--all", *flags], cwd=clone, check=True)
    return list(CHECK["problems"](clone))


def test_a_clean_tree_has_no_problems(clone: Path) -> None:
    assert add(clone) == []


def test_links_and_ignored_files_are_refused(clone: Path) -> None:
    (clone / ".venv-vllm").symlink_to("/of/one/machine")
    (clone / "notes.log").write_text("x")
    (clone / ".gitignore").write_text("*.log\n")
    link, ignored = add(clone, "--force")
    assert link.startswith(".venv-vllm: a tracked link")
    assert ignored.startswith("notes.log: tracked, though .gitignore names it")


@pytest.mark.parametrize(
    "line", ["pip install {}", "python -m pip install -U '{}[vllm]'", 'pip install "{}==0.2"', "`pip install {}`"]
)
def test_another_projects_name_is_refused(clone: Path, line: str) -> None:
    (clone / "page.md").write_text(f"\n{line.format('warmpath')}\n")
    [problem] = add(clone)
    assert problem.startswith("page.md:2: PyPI's warmpath is another project")
