"""What a prompt's file says of the moment is found, and what only looks like it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cache_diagnostics.lint import compare, lint
from serve_app.cli.main import app


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Today is {{ current_date }}.", "date"),
        ("Now: ${NOW}", "time"),
        ("It is {datetime.now():%H:%M}.", "time"),
        ("id {request_id}", "uuid"),
        ("<%= session_id %>", "uuid"),
        ("Today is 2026-11-22.", "date"),
        ("Session 6f1c1d1e-0d5f-4c3e-9a53-0a5b8a2a9c11", "uuid"),
        ("timestamp: 1763800000", "epoch"),
        ("This is request #41", "counter"),
        ("A line. ", "whitespace"),
        ("A\u00a0line.", "whitespace"),
    ],
)
def test_what_changes_is_found(line: str, reason: str) -> None:
    """With its line and where it begins."""
    finds = lint(f"First.\n{line}\nLast.\n")
    assert [find.reason for find in finds] == [reason] and finds[0].line == 2


@pytest.mark.parametrize(
    "line",
    [
        "The policy of 2024-01-05 holds.",
        "Use {{ user_timezone }} and {name}.",
        "Version 1.2.3, price $4.90, ratio 16:9, phone (415) 555-0100.",
        "Step 3: answer in at most 200 words.",
        '{"timeout": 30, "format": "{date_format}"}',
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ],
)
def test_what_stays_is_no_find(line: str) -> None:
    """Dates of documents, versions, prices, limits, digests, and placeholders of other things."""
    assert lint(f"First.\n{line}\nLast.\n") == []


def test_versions_are_compared() -> None:
    """The first difference and its class, or none."""
    assert compare("a\nb", "a\nb") is None
    find = compare("Rules.\nToday is 2026-11-21. Be kind.", "Rules.\nToday is 2026-11-22. Be kind.")
    assert find is not None and (find.line, find.reason) == (2, "date")


def test_the_command_says_where_and_how_much(tmp_path: Path) -> None:
    """Status 1 with finds, 0 without, 2 for a file that cannot be read."""
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("You are the clerk.\n")
    bad.write_text("You are the clerk.\nToday is {date}.\n" + "Be kind. " * 100 + "\n")

    def run(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["prompts", "lint", *map(str, arguments)])
        return result.exit_code, result.output

    assert run(good) == (0, "nothing that changes was found\n")
    status, said = run(good, bad)
    assert status == 1 and f"{bad}:2: placeholder of a date: {{date}}; about 228 tokens from here on" in said
    assert "last user message" in said and "spaces at the end of the line" in said
    status, said = run(bad, "--against", good)
    assert status == 1 and f"{bad}:2: differs in text" in said
    assert run(tmp_path / "none")[0] == 2
