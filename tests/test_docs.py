"""What the documents name exists: files, folders, tests, modules, benchmarks, links."""

import ast
import inspect
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from benchmarks.__main__ import MODULES
from serve_app.api.anthropic.request import MessagesBody
from serve_app.api.openai.request import ChatBody, CompletionBody
from serve_app.api.openai.responses.request import ResponsesBody
from serve_app.engine.protocol import Adapters, Engine, EngineRequest, KvTransfer, SamplingParams, TokenRules
from serve_app.engine.vllm.refusals import TABLE

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
)
LOG = ROOT / "benchmarks" / "log"
"""Findings name the commands and files of their day; the head of each says which commit has them."""
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)#\s]+)[^)]*\)")
_PATH = re.compile(r"^(?:router|serve_app|cluster|benchmarks|tests|docs)/[\w./-]*$")
_MODULE = re.compile(r"^(?:router|serve_app|cluster)(?:\.\w+)+$")
_PAGE = re.compile(r"docs/\w+\.md")
_BENCHMARK = re.compile(r"python -m benchmarks (\w+)")


@cache
def _names(path: Path) -> frozenset[str]:
    """Return the functions and classes that a file defines, and what it assigns at its top."""
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
    """Return what is wrong with a piece of code that a page shows, or None."""
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
def test_what_a_page_names_exists(page: Path) -> None:
    """Paths, tests, modules and benchmarks (a log has those of its day); links, relative to their page."""
    text = page.read_text()
    links = [link for link in _LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    if LOG not in page.parents:
        assert [problem for code in _CODE.findall(text) if (problem := _missing(code))] == []
        assert set(_BENCHMARK.findall(text)) - {"NAME"} <= set(MODULES)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT / "docs"], ids=lambda page: page.name)
def test_pages_do_not_cite_tests(page: Path) -> None:
    """A reader of a page wants the fact; the test names the page in its docstring."""
    assert re.findall(r"tests/[\w/]*test_\w+\.py|::test_\w+", page.read_text()) == []


def test_pages_that_tests_cite_exist() -> None:
    """A docstring that ends in a page's name leads to it."""
    cited = {name for path in (ROOT / "tests").rglob("*.py") for name in _PAGE.findall(path.read_text())}
    assert {name for name in cited if not (ROOT / name).exists()} == set()


def test_readme_names_every_field_that_is_refused() -> None:
    """Whoever brings an app knows before the first 400 what will not work."""
    _, limits = (ROOT / "README.md").read_text().split("## Limits")
    refused = {*ChatBody.refused, *CompletionBody.refused, *ResponsesBody.refused}
    assert {field for field in refused if f"`{field}`" not in limits} == set()


def test_the_page_of_the_api_names_every_field() -> None:
    """For each API whether a field is taken, refused or not there; and no field that there is not. (docs/api.md)"""
    rows: dict[str, list[str]] = {}
    for line in (ROOT / "docs/api.md").read_text().splitlines():
        if line.startswith("| `"):
            names, *states, _ = [cell.strip() for cell in line.strip("|").split("|")]
            rows |= dict.fromkeys(_CODE.findall(names), states)
    for column, body in enumerate((ChatBody, CompletionBody, ResponsesBody, MessagesBody)):
        expected = {
            **dict.fromkeys((*body.model_fields, *body.without_effect), "taken"),
            **dict.fromkeys(body.refused, "refused"),
        }
        shown = {
            name: "refused" if states[column] == "refused" else "taken"
            for name, states in rows.items()
            if states[column] != "-"
        }
        assert shown == expected


def test_what_does_not_exist_is_noticed() -> None:
    """The test of the tests above."""
    assert _missing("router/nowhere.py")
    assert _missing("tests/test_docs.py::test_nothing")
    assert _missing("serve_app.nowhere.at_all")
    assert _missing("tests/test_docs.py::test_what_does_not_exist_is_noticed") is None
    assert _missing("serve_app.config.reference") is None
    assert _missing("serve_app/engine/") is None


ENGINES = (ROOT / "docs/vllm.md", ROOT / "docs/engines.md")
PROMISED = "What is promised"
REFUSED = "Settings that vLLM refuses"
_STATE = re.compile(r"^(yes|no|refused)(: .+)?$")


def tables() -> dict[str, dict[str, list[str]]]:
    """Return the pages' tables by heading: a row's first cell, without its backquotes, and the others."""
    by_heading: dict[str, dict[str, list[str]]] = {}
    parts = {page.name: page.read_text().split("\n## ")[1:] for page in ENGINES}
    promised = [part for part in parts["vllm.md"] if part.startswith(PROMISED)]
    for part in [*promised, *parts["engines.md"]]:
        heading, *lines = part.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        assert len({row[0] for row in rows}) == len(rows), f"a row of {heading!r} is there twice"
        if rows:
            by_heading[heading] = {name if heading == REFUSED else name.strip("`"): cells for name, *cells in rows[2:]}
    return by_heading


def names_of(heading: str) -> set[str]:
    return set(next(rows for title, rows in tables().items() if heading in title))


def test_every_cell_says_yes_no_or_refused() -> None:
    """Of each of the three engines; behind it there may be words."""
    for heading, rows in tables().items():
        if heading == REFUSED:
            continue
        for name, cells in rows.items():
            assert len(cells) == 3 and all(_STATE.match(cell) for cell in cells), (heading, name)


def test_the_page_names_every_part_of_the_contract() -> None:
    """Who adds to the contract says what each engine does with it."""
    members = set()
    for begin, kind in (("", Engine), ("adapters.", Adapters), ("transfer.", KvTransfer)):
        members |= {f"{begin}{name}" for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
    assert names_of("(`Engine`)") == members - {"adapters", "transfer"}
    assert names_of("`EngineRequest`") == {field.name for field in fields(EngineRequest)}
    assert names_of("`SamplingParams`") == {
        field.name for kind in (SamplingParams, TokenRules) for field in fields(kind)
    }


def test_the_page_names_every_setting_that_vllm_refuses() -> None:
    """And none that it takes."""
    named = [name for row in tables()[REFUSED] for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(named) == sorted(name for refusal in TABLE for name in refusal.settings)
