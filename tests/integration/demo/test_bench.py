"""`warmpath bench` against a real server: its three questions, and its errors when it cannot ask them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.console import console
from serve_app.cli.main import app
from tests.integration.demo.conftest import KEYS, Served

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal the console has 80 columns, and would break the table's lines."""
    monkeypatch.setattr(console, "width", 200)


FEW = ["--requests", "3", "--words", "60", "--max-tokens", "4"]


def bench(served: Served, *arguments: str, tenant: str = "acme") -> Result:
    url = ["--url", served.url, "--api-key", KEYS[tenant][0]]
    return CliRunner().invoke(app, ["bench", *arguments, *url])


def rows(told: Result) -> dict[str, str]:
    """Return the cached part of the prompts by the table's row names."""
    assert told.exit_code == 0, told.output + told.stderr
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in told.stderr.splitlines() if "│" in line]
    return {row[0]: row[-1] for row in cells}


def test_speed_is_told_of_new_prompts_and_of_the_same_again(served: Served) -> None:
    found = rows(bench(served, "speed", *FEW))
    assert found["new prompts"] == "0%"
    assert int(found["the same again"].rstrip("%")) > 60


def test_the_cache_is_measured_with_ones_own_prompts(served: Served, tmp_path: Path) -> None:
    """The server has seen the prompts, but each is first measured alone. Inputs: bodies and lines of a batch file."""
    file = tmp_path / "requests.jsonl"
    system = {"role": "system", "content": "The rules of the bench, once more. " * 30}
    bodies = [{"messages": [system, {"role": "user", "content": text}], "max_tokens": 2} for text in "abc"]
    lines = [*map(json.dumps, bodies), json.dumps({"custom_id": "x", "body": bodies[0]})]
    file.write_text("\n".join(lines))
    for _ in range(2):
        found = rows(bench(served, "cache", str(file)))
        assert found["without the cache"] == "0%"
        assert int(found["with the cache"].rstrip("%")) > 50


@pytest.mark.parametrize("neighbour", ["globex", "limited"])
def test_a_neighbours_flood_leaves_the_cache(served: Served, neighbour: str) -> None:
    """The flood also goes on where a limit refuses most of it."""
    flags = [*FEW, "--flood-api-key", KEYS[neighbour][0], "--flood-at-once", "4"]
    found = rows(bench(served, "neighbour", *flags))
    assert int(found["beside a flood"].rstrip("%")) > 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cache", "/no/file"], "No such file"),
        (["neighbour", "--flood-api-key", KEYS["acme"][0]], "a neighbour is another tenant"),
        (["speed", "--model", "none", *FEW], "a request failed: HTTP 404"),
    ],
)
def test_an_impossible_question_is_reported_in_a_sentence(served: Served, arguments: list[str], words: str) -> None:
    told = bench(served, *arguments)
    assert told.exit_code == 2
    assert words in " ".join(told.stderr.split())


def test_a_server_that_is_not_there_is_a_sentence() -> None:
    told = CliRunner().invoke(app, ["bench", "speed", "--url", "http://127.0.0.1:9"])
    assert told.exit_code == 2 and "name a running server with --url" in " ".join(told.stderr.split())
