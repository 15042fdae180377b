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
from serve_app.cli.commands.top_display import REASONS, State, frame
from serve_app.cli.main import app
from serve_app.ingress.routes import events as route
from tests.serve_app.ingress.routes.test_events import KEYS, Stage
from tests.serve_app.live.traffic import decision, generation

KEY_VARIABLES = ("WARMPATH_OPERATOR_KEY", "WARMPATH_API_KEY")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage(("a", "b"))
    made.call(lambda: made.live.delivered(generation("a", [1, 2, 3], 1, 2, "rules@2"), decision(), 0, 0.5, None))
    yield made
    made.stop()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, **keys: str) -> Any:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, key in keys.items():
        monkeypatch.setenv(name, key)
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner().invoke(app, ["top", *arguments])


def test_one_frame_and_the_snapshot(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator sees pools and the public prompt's name; a tenant its own part, as JSON if it likes."""
    operator = KEYS["operator"][0]
    shown = run(monkeypatch, "--once", "--url", stage.url, WARMPATH_OPERATOR_KEY=operator)
    assert shown.exit_code == 0, shown.output
    for text in ("2 replicas", "rules@2", "everybody", "simulated", "1 requests", "joining"):
        assert text in shown.output
    found = json.loads(run(monkeypatch, "--json", "--url", stage.url, WARMPATH_API_KEY=KEYS["b"][0]).output)
    assert (found["tenant"], found["prefixes"]) == ("b", [])


def test_what_is_wrong_is_one_sentence(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens; the key is refused."""
    silent = run(monkeypatch, "--once", "--url", "http://127.0.0.1:9")
    assert silent.exit_code == 2
    assert "nobody answers at http://127.0.0.1:9" in silent.stderr
    refused = run(monkeypatch, "--once", "--url", stage.url, WARMPATH_API_KEY="wp-guess")
    assert refused.exit_code == 2
    assert "No tenant has this API key" in refused.stderr
    assert "WARMPATH_API_KEY" in refused.stderr


@pytest.mark.parametrize(
    "told", ["hello", "[]", "{}", '{"type": "snapshot"}', '{"type": "snapshot", "replicas": [3], "about": {}}', "null"]
)
def test_a_server_that_is_none_of_ours_is_one_sentence(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it answers with."""

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = run(monkeypatch, "--once", "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert shown.exit_code == 2, shown.output
    assert "does not answer as warmpath does" in shown.stderr


def test_every_event_changes_the_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what only operators see, and an event of a later version."""
    assert route.HEARTBEAT_S < 15.0
    state = State()
    replica = {"replica": "r1", "state": "serving", "running": 2, "waiting": 0, "queued_tokens": 77, "full": False}
    replica |= {"blocks_total": 10, "blocks_used": 5, "blocks_reusable": 5, "prefill_tokens_per_s": 1000.0}
    told = {"at_s": 0.0, "tenant": "[acme]", "replica": "r1", "prompt_tokens": 100, "cached_tokens": 96}
    for event in (
        {"type": "snapshot", "viewer": "operator", "model": "m", "engine": "torch", "simulated": False,
         "policy": "p", "replicas": [], "prefixes": [], "totals": [], "decisions": [], "moves": [], "scale": None},
        {"type": "replica", **replica},
        {"type": "evictions", "blocks": 12},
        {"type": "pulls", "tokens": 345},
        {"type": "skipped", "decisions": 6},
        {"type": "move", "kind": "handover", "replica": "r0", "blocks": 9, "seconds": 0.1, "state": "done"},
        {"type": "scale", "from": 1, "target": 2, "reason": "ttft", "why": "first tokens take 3 s"},
        {"type": "from_the_future"},
        *({"type": "decision", **told, "reason": reason, "ttft_s": 0.25, "cold_ttft_s": None} for reason in REASONS),
    ):  # fmt: skip
        state.take(event)
    out = io.StringIO()
    Console(file=out, width=200).print(frame(state, "trying again"))
    expected = ["1 replicas", "77", "12 blocks evicted", "345 tokens pulled", "6 events not shown", "handed over 9"]
    expected += ["first tokens take 3 s", "[acme]", "0.250", "the holder has too much to do", "trying again"]
    for text in expected:
        assert text in out.getvalue(), text
    state.take({"type": "replica_left", "replica": "r1"})
    assert state.replicas == {}


def test_names_of_a_server_are_never_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that a terminal would obey, or that is markup, is text: in a frame, and where an error quotes a server."""
    wrong = "[/]\x1b]52;c;cm0gLXJm\x1b\\\x9b2J\u202e"
    state = State()
    replica = {"replica": wrong, "state": wrong, "engine": "simulated", "simulated": True}
    node = {"id": "1", "parent": None, "kind": "public", "tenant": wrong, "label": wrong, "tokens": 1}
    node |= {"prefix_tokens": 1, "pinned": False, "requests": 1, "hits": 1, "last_used_at_s": 0.0}
    node["holders"] = {wrong: 1}
    told = {"at_s": 0.0, "tenant": wrong, "replica": wrong, "reason": wrong, "prompt_tokens": 1, "cached_tokens": 1}
    state.take(
        {"type": "snapshot", "viewer": "tenant", "tenant": wrong, "model": wrong, "engine": wrong, "policy": wrong,
         "replicas": [replica], "prefixes": [node], "totals": [], "decisions": [told]}
    )  # fmt: skip
    state.take({"type": "scale", "from": 1, "target": 2, "reason": wrong, "why": wrong})
    out = io.StringIO()
    Console(file=out, width=400).print(frame(state))
    monkeypatch.setattr(cli_console, "console", Console(file=out))
    with pytest.raises(SystemExit):
        cli_console.fail(wrong)
    assert out.getvalue().count("[/]") == 15
    assert re.findall(r"[^\n\x20-\x7e\xa0-\u2027\u2030-\uffff]", out.getvalue()) == []
