"""Names in the documents exist, generated pages are current, and pages written by hand are short."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import BENCHMARKS
from benchmarks.figures import FIGURES, ROWS, in_readme
from serve_app.ingress.routes.reference import api_page
from tests.pages import DOCS, README, ROOT, WRITTEN, blocks_of

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
LOG = ROOT / "benchmarks" / "log"
"""Findings name the commands and files of their day; the head of each names the commit that has them."""
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)#\s]+)[^)]*\)")
_PATH = re.compile(r"^(?:router|serve_app|cluster|benchmarks|tests|docs)/[\w./-]*$")
_MODULE = re.compile(r"^(?:router|serve_app|cluster)(?:\.\w+)+$")
_PAGE = re.compile(r"docs/[\w/-]+\.md")
_CITED = re.compile(r"(?:[.(] ?|^ *|\"\"\")docs: ([a-z-]+(?:, [a-z-]+)*)", re.MULTILINE)
_BENCHMARK = re.compile(r"python -m benchmarks (\w+)")


@cache
def _names(path: Path) -> frozenset[str]:
    """Return the functions and classes that a file defines, and its top-level assignments."""
    tree = ast.parse(path.read_text())
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return frozenset(defined | assigned)


def _missing(code: str) -> str | None:
    """Return the error in a piece of code that a page shows, or None."""
    path, separator, name = code.partition("::")
    if _PATH.match(path):
        if not (ROOT / path).exists():
            return f"there is no {path}"
        if separator and name not in _names(ROOT / path):
            return f"{path} has no {name}"
    if _MODULE.match(code):
        parts = code.split(".")
        while parts and not (ROOT.joinpath(*parts).is_dir() or ROOT.joinpath(*parts).with_suffix(".py").exists()):
            parts.pop()
        if len(parts) < code.count("."):
            return f"there is no module {code}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_on_a_page_exist(page: Path) -> None:
    """Paths, tests, modules and benchmarks exist (except in logs), and links, relative to their page."""
    text = page.read_text()
    links = [link for link in _LINK.findall(text) if "://" not in link] if page.name != "CHANGELOG.md" else []
    assert [link for link in links if not (page.parent / link).exists()] == []
    if LOG not in page.parents and page.name != "CHANGELOG.md":
        assert [problem for code in _CODE.findall(text) if (problem := _missing(code))] == []
        assert set(_BENCHMARK.findall(text)) - {"NAME"} <= set(BENCHMARKS)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_pages_do_not_cite_tests(page: Path) -> None:
    """A page's reader wants the fact; the test names the page in its docstring."""
    assert re.findall(r"tests/[\w/]*test_\w+\.py|::test_\w+", page.read_text()) == []


def test_pages_that_the_code_cites_exist() -> None:
    """Tests name the pages with the promises they check, as `docs: failures`; errors and docstrings name paths."""
    rooms = ("tests", "router", "serve_app", "benchmarks", "cluster")
    text = "".join(path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py"))
    assert {name for name in _PAGE.findall(text) if not (ROOT / name).exists()} == set()
    cited = {name for names in _CITED.findall(text) for name in names.split(", ")}
    assert cited - {page.stem for page in DOCS.rglob("*.md")} == set()
    assert len(cited) > 10


def test_missing_names_are_noticed() -> None:
    """This tests the tests above."""
    assert _missing("router/nowhere.py")
    assert _missing("tests/test_docs.py::test_nothing")
    assert _missing("serve_app.nowhere.at_all")
    assert _missing("tests/test_docs.py::test_missing_names_are_noticed") is None
    assert _missing("serve_app.config.reference") is None
    assert _missing("serve_app/engine/") is None


def test_the_page_of_the_api_is_current() -> None:
    """`make docs` generates it."""
    assert (DOCS / "reference" / "api.md").read_text() == api_page()


def test_the_page_of_the_command_line_is_current() -> None:
    """`make docs` generates it, with every command and flag."""
    from typer.cli import app as typer_app

    told = CliRunner().invoke(
        typer_app, ["serve_app.cli.main", "utils", "docs", "--name", "warmpath", "--title", "Command line"]
    )
    _, _, page = (DOCS / "reference" / "cli.md").read_text().partition("\n")
    assert page.strip() == told.output.strip()


def words_of(page: Path) -> int:
    return len(page.read_text().split())


def test_readers_have_little_to_read() -> None:
    """README: at most 120 lines and 900 words. The pages by hand: at most 25, of 15,000 words in all."""
    assert len(README.read_text().splitlines()) <= 120
    assert words_of(README) <= 900
    assert len(WRITTEN) <= 25
    assert sum(map(words_of, WRITTEN)) <= 15_000


def test_every_page_is_in_the_navigation() -> None:
    told = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert told == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_blocks_that_do_not_run_have_a_reason() -> None:
    """Commands and scripts run in tests/integration/test_pages.py; others have a reason."""
    blocks = [block for page in (README, *WRITTEN) for block in blocks_of(page)]
    assert {block.mark for block in blocks if not block.mark.startswith("not run: ")} <= {"", "server"}
    assert [block.text for block in blocks if block.language == "yaml" and not block.runs and not block.mark] == []
    assert sum(block.runs for block in blocks) > 40


def test_readme_quotes_the_figures() -> None:
    """They come from `make figures`, which writes both."""
    figures = json.loads(FIGURES.read_text())
    assert set(figures) == set(ROWS)
    assert README.read_text() == in_readme(README.read_text(), figures)
