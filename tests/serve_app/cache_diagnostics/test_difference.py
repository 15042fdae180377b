"""The first difference, its class, and what is equal behind it; what a file's linter finds of the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve_app.cache_diagnostics.difference import classify, value_there
from serve_app.cache_diagnostics.explain import GRAM, equal_behind
from serve_app.cache_diagnostics.lint import lint
from serve_app.cli.main import app
from serve_app.prompts.lock import first_difference


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(0, 5))
def test_what_is_equal_behind_is_what_a_naive_search_finds(new: list[int], old: list[int], start: int) -> None:
    """Tokens of eight in a row that the other prompt has in a row too, at whatever place behind the difference."""
    known = {tuple(old[at : at + GRAM]) for at in range(start, len(old) - GRAM + 1)}
    covered: set[int] = set()
    for at in range(start, len(new) - GRAM + 1):
        if tuple(new[at : at + GRAM]) in known:
            covered.update(range(at, at + GRAM))
    assert equal_behind(np.array(new, dtype=np.int32), np.array(old, dtype=np.int32), start) == len(covered)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Today is 2026-11-21.", "Today is 2026-11-22.", "time"),
        ("It is Mon, 21 November 2026 now", "It is Tue, 22 November 2026 now", "time"),
        ("2026-11-21T10:00:00Z go", "2026-11-21T10:00:01Z go", "time"),
        ("t=1763800000 x", "t=1763800001 x", "time"),
        ("Turn 3:", "Turn 4:", "id"),
        ("as 6f1c1d1e-0d5f-4c3e-9a53-0a5b8a2a9c11.", "as 6f1c1d1e-0d5f-4c3e-9a53-0a5b8a2a9c12.", "id"),
        ("a  b and so on", "a b and so on", "whitespace"),
        ('x {"a": 1, "b": [2, 3]} y', 'x {"b": [2, 3], "a": 1} y', "reordered"),
        ("- one\n- two\nend", "- two\n- one\nend", "reordered"),
        ('x {"a": 1, "b": 2} y', 'x {"a": 2, "b": 3} y', "text"),
        ("Use v1.2.3", "Use v1.2.4", "text"),
        ("It costs $4.90.", "It costs $4.95.", "text"),
        *((f'{"[" * depth}"one"{"]" * depth}', f'{"[" * depth}"two"{"]" * depth}', "text") for depth in (40, 4000)),
    ],
)  # fmt: skip
def test_classes(old: str, new: str, reason: str) -> None:
    """What only looks like a date, an id or another order is text."""
    assert classify(new, old, first_difference(new, old)) == reason


def test_what_stands_there_is_shown_as_a_whole() -> None:
    """The whole value, though its last digit alone differs; of a long word the beginning."""
    text = "Today is 2026-11-22."
    assert value_there(text, text.index("22")) == "2026-11-22"
    assert len(value_there("x" * 500, 3)) == 64 and value_there("", 0) == ""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Today is {{ current_date }}.", "time"),
        ("Now: ${NOW}", "time"),
        ("It is {datetime.now():%H:%M}.", "time"),
        ("Today is 2026-11-22.", "time"),
        ("timestamp: 1763800000", "time"),
        ("id {request_id}", "id"),
        ("<%= session_id %>", "id"),
        ("Session 6f1c1d1e-0d5f-4c3e-9a53-0a5b8a2a9c11", "id"),
        ("This is request #41", "id"),
        ("A line. ", "whitespace"),
        ("A\u00a0line.", "whitespace"),
        ("The policy of 2024-01-05 holds.", ""),
        ("Use {{ user_timezone }} and {name}.", ""),
        ("Version 1.2.3, price $4.90, ratio 16:9, phone (415) 555-0100.", ""),
        ("Step 3: answer in at most 200 words.", ""),
        ('{"timeout": 30, "format": "{date_format}"}', ""),
        ("sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", ""),
    ],
)
def test_a_linter_finds_what_changes_and_nothing_else(line: str, reason: str) -> None:
    """With its line; dates of documents, versions, prices, limits and digests stay as they are."""
    assert [(find.line, find.reason) for find in lint(f"First.\n{line}\nLast.\n")] == [(2, reason)] * bool(reason)


def test_the_linters_command_says_where_and_how_much(tmp_path: Path, demo_model_path: Path) -> None:
    """Status 1 with finds, 0 without, 2 for a file that cannot be read; tokens are the model's where it is named."""
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("You are the clerk.\n")
    bad.write_text("You are the clerk.\nToday is {date}.\n" + "Be kind. " * 100 + "\n")

    def run(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["prompts", "lint", *map(str, arguments)])
        return result.exit_code, result.output

    assert run(good) == (0, "nothing that changes was found\n")
    status, said = run(good, bad)
    assert status == 1 and f"{bad}:2: placeholder of a time: {{date}}; about 228 tokens from here on" in said
    assert "last user message" in said and "spaces at the end of the line" in said
    status, exact = run(bad, "--model", demo_model_path)
    assert status == 1 and "about" not in exact
    status, said = run(bad, "--against", good)
    assert status == 1 and f"{bad}:2: differs in text" in said
    assert run(good, "--against", good)[0] == 0
    assert run(tmp_path / "none")[0] == 2
