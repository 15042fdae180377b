"""`warmpath top` against an ingress on loopback."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli import console as cli_console
from serve_app.cli.commands.top import POOL
from serve_app.cli.main import app
from tests.serve_app.ingress.routes.test_events import KEYS, Stage
from tests.serve_app.live.traffic import decision, generation

KEY_VARIABLES = ("WARMPATH_OPERATOR_KEY", "WARMPATH_API_KEY")
REPLICA = {"replica": "r1", "state": "serving", "running": 2, "waiting": 0, "queued_tokens": 77, "full": False}
REPLICA |= {"blocks_total": 10, "blocks_used": 5, "blocks_reusable": 5, "prefill_tokens_per_s": 1000.0}
DECISION = {"at_s": 0.0, "tenant": "[acme]", "replica": "r1", "prompt_tokens": 100, "cached_tokens": 96}
DECISION |= {"reason": "load_spill", "ttft_s": 0.25, "cold_ttft_s": None}
SNAPSHOT: dict[str, Any] = {
    "viewer": "operator",
    "model": "m",
    "engine": "torch",
    "simulated": False,
    "policy": "p",
    "replicas": [REPLICA],
    "prefixes": [],
    "totals": [],
    "decisions": [DECISION],
    "moves": [{"kind": "handover", "replica": "r0", "blocks": 9, "seconds": 0.1, "state": "done"}],
    "scale": {"from": 1, "target": 2, "reason": "ttft", "why": "first tokens take 3 s"},
}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage(("a", "b"))
    made.call(lambda: made.live.delivered(generation("a", [1, 2, 3], 1, 2, "rules@2"), decision(), 0, 0.5, None))
    yield made
    made.stop()


def run(monkeypatch: pytest.MonkeyPatch, url: str, **keys: str) -> Any:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, key in keys.items():
        monkeypatch.setenv(name, key)
    monkeypatch.setenv("COLUMNS", "400")
    return CliRunner().invoke(app, ["top", "--once", "--url", url])


def answered_with(monkeypatch: pytest.MonkeyPatch, body: str, status: int = 200) -> Any:
    """Run it at a server that has one answer."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = run(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    return shown


@pytest.mark.parametrize(
    ("variable", "key", "words"),
    [
        (KEY_VARIABLES[0], "operator", ("2 replicas", "rules@2", "everybody", "simulated", "1 requests", "joining")),
        (KEY_VARIABLES[1], "b", ("2 replicas", "tenant b", "0 requests")),
    ],
)
def test_one_frame(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, variable: str, key: str, words: tuple[str, ...]
) -> None:
    """An operator sees pools and the public prompt's name; a tenant its own part."""
    shown = run(monkeypatch, stage.url, **{variable: KEYS[key][0]})
    assert shown.exit_code == 0, shown.output
    assert [text for text in words if text not in shown.output] == []
    assert (POOL in shown.output) == ("rules@2" in shown.output) == (key == "operator")


def test_what_is_wrong_is_one_sentence(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens; the key is refused; the server is not well."""
    silent = run(monkeypatch, "http://127.0.0.1:9")
    assert silent.exit_code == 2
    assert "nobody answers at http://127.0.0.1:9" in silent.stderr
    refused = run(monkeypatch, stage.url, WARMPATH_API_KEY="wp-guess")
    assert refused.exit_code == 2
    assert "No tenant has this API key" in refused.stderr
    assert "WARMPATH_API_KEY" in refused.stderr
    assert "answers with status 503" in answered_with(monkeypatch, "down", 503).stderr
    stopping = json.dumps({"error": {"message": "The server is stopping."}})
    assert "The server is stopping.; start an instance" in answered_with(monkeypatch, stopping, 503).stderr


@pytest.mark.parametrize("body", ["hello", "[]", "{}", '{"replicas": [3], "about": {}}', "null"])
def test_a_server_that_is_none_of_ours_is_one_sentence(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it answers with."""
    shown = answered_with(monkeypatch, body)
    assert shown.exit_code == 2, shown.output
    assert "does not answer as warmpath does" in shown.stderr


def test_everything_of_a_snapshot_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = answered_with(monkeypatch, json.dumps(SNAPSHOT)).output
    words = ["1 replica", "77", "handed over 9", "first tokens take 3 s", "[acme]", "0.250", "load_spill"]
    assert [text for text in words if text not in shown] == []


def test_names_of_a_server_are_never_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that a terminal would obey, or that is markup, is text: in a frame, and where an error quotes a server."""
    wrong = "[/]\x1b]52;c;cm0gLXJm\x1b\\\x9b2J\u202e"
    node = {"id": "1", "parent": None, "kind": "public", "tenant": wrong, "label": wrong, "tokens": 1}
    node |= {"prefix_tokens": 1, "pinned": False, "requests": 1, "hits": 1, "holders": {wrong: 1}}
    names = dict.fromkeys(("model", "engine", "policy", "tenant"), wrong)
    snapshot = {**SNAPSHOT, **names, "viewer": "tenant", "prefixes": [node]}
    snapshot["replicas"] = [{"replica": wrong, "state": wrong}]
    snapshot["decisions"] = [{**DECISION, "tenant": wrong, "replica": wrong, "reason": wrong}]
    snapshot["scale"] = {"from": 1, "target": 2, "reason": wrong, "why": wrong}
    out = io.StringIO()
    monkeypatch.setattr(cli_console, "console", Console(file=out))
    with pytest.raises(SystemExit):
        cli_console.fail(wrong)
    shown = answered_with(monkeypatch, json.dumps(snapshot)).output + out.getvalue()
    assert shown.count("[/]") == 15
    assert re.findall(r"[^\n\x20-\x7e\xa0-\u2027\u2030-\uffff]", shown) == []
