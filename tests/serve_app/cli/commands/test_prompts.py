"""`warmpath prompts`: versions are locked and changes found; an instance's answers cannot harm a terminal."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli import console
from serve_app.cli.main import app

OTHERS = "does not answer as warmpath does"


NO_KEYS: dict[str, str | None] = {"WARMPATH_OPERATOR_KEY": None, "WARMPATH_API_KEY": None}


def run(*arguments: str | Path, **keys: str) -> tuple[int, str]:
    """``keys``: the variables with API keys that are set."""
    result = CliRunner(env=NO_KEYS | keys).invoke(app, ["prompts", *map(str, arguments)])
    return result.exit_code, result.output


def test_versions_are_locked_and_checked(tmp_path: Path) -> None:
    shelf, text = tmp_path / "prompts", tmp_path / "text"
    text.write_bytes(b"You are the clerk.\nBe brief.\n")
    assert run("add", "clerk@1", text, "--dir", shelf)[0] == 0
    text.write_bytes(b"You are the clerk.\nBe kind.\n")
    status, said = run("add", "clerk@2", text, "--dir", shelf)
    assert status == 0 and said.startswith("clerk@2  sha256:") and "public" in said
    assert "private to acme" in run("add", "pilot@1", text, "--tenant", "acme", "--dir", shelf)[1]
    assert run("verify", "--dir", shelf) == (0, f"{shelf}: 3 prompts, all as they were locked\n")
    (shelf / "clerk/2.txt").write_bytes(b"You are the clerk.\nBe kind.\r\n")
    status, said = run("verify", "--dir", shelf)
    assert status == 1 and said.count("sha256:") == 2 and "the first differing byte is 27" in said
    assert run("add", "clerk", text, "--dir", shelf)[0] == 2


class Instance(HTTPServer):
    """A server with one answer, which remembers the keys it received."""

    status, body = 200, ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.keys: list[str | None] = []

    def asked(self, **keys: str) -> tuple[int, str]:
        return run("status", "--url", f"http://127.0.0.1:{self.server_port}", **keys)


class _Handler(BaseHTTPRequestHandler):
    server: Instance

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, '{"error": {"message": "No tenant has this API key."}}', "$WARMPATH_OPERATOR_KEY or $WARMPATH_API_KEY)"),
        (503, '{"error": {"message": "The server is stopping."}}', "The server is stopping."),
        (503, "down", "answers with status 503"),
        (404, "[]", OTHERS),
        (200, "hello", OTHERS),
    ],
)
def test_an_answer_that_is_none_is_one_sentence(instance: Instance, status: int, body: str, words: str) -> None:
    instance.status, instance.body = status, body
    left_with, said = instance.asked()
    assert (left_with, words in said, said.count("\n")) == (2, True, 1)


def test_the_replicas_where_a_prompt_is_warm_are_counted(instance: Instance) -> None:
    prompt = {"name": "clerk", "tenant": None, "promoted": "1", "previous": None, "versions": []}
    warm = [{"replicas": ["r1"]}, {"replicas": ["r1", "r2"]}]
    instance.body = json.dumps({"data": [{**prompt, "warm": warm}]})
    shown = instance.asked()[1]
    assert "warm on 1 replica: r1\n" in shown and "warm on 2 replicas: r1, r2\n" in shown


def test_nobody_answers_is_one_sentence() -> None:
    status, said = run("status", "--url", "http://127.0.0.1:9")
    assert status == 2 and said.startswith("error: no server answers at http://127.0.0.1:9: ") and "Errno" not in said


def test_an_operators_key_comes_before_a_tenants(instance: Instance) -> None:
    instance.body = '{"data": []}'
    for keys in ({"WARMPATH_API_KEY": "a"}, {"WARMPATH_API_KEY": "a", "WARMPATH_OPERATOR_KEY": "b"}):
        assert instance.asked(**keys)[0] == 0
    assert instance.keys == ["Bearer a", "Bearer b"]


def test_names_of_a_server_are_never_commands(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """A name with terminal commands is shown as text, also if an error quotes a server."""
    wrong = "[/]\x1b]52;c;cm0gLXJm\x1b\\\x9b2J\u202e"
    with pytest.raises(SystemExit):
        console.fail(wrong)
    refused = capsys.readouterr().err
    prompt = {"name": wrong, "tenant": wrong, "promoted": wrong, "previous": wrong, "versions": []}
    instance.body = json.dumps({"data": [{**prompt, "warm": [{"replicas": [wrong]}]}]})
    shown = instance.asked()[1] + refused
    assert shown.count("[/]") == 6
    assert re.findall(r"[^\n\x20-\x7e\xa0-\u2027\u2030-\uffff]", shown) == []
