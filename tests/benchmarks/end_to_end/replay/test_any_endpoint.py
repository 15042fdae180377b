"""The whole command against an OpenAI endpoint that is not ours: keys by tenant, refusals, no cached tokens told."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.end_to_end.replay.run import main

ASKED: Counter[tuple[str, str]] = Counter()


class Foreign(BaseHTTPRequestHandler):
    """Streams two tokens to whoever has a key, refuses one tenant, and tells usage without cached tokens."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers.get("authorization", "").removeprefix("Bearer ")
        ASKED[self.path, key] += 1
        self.send_response(429 if key == "refused" else 200)
        self.end_headers()
        if key == "refused":
            return
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}
        choice = {"delta": {"content": "a"}} if "messages" in body else {"text": "a"}
        events = [json.dumps({"choices": [choice]})] * 2 + [json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        self.wfile.write("".join(f"data: {event}\n\n" for event in events).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_log_against_a_foreign_server(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each tenant with its key, at each body's endpoint; figures by tenant."""
    log = tmp_path / "log.jsonl"
    chat = {"model": "theirs", "messages": [{"role": "user", "content": "Hello"}]}
    completion = {"method": "POST", "url": "/v1/completions", "body": {"model": "theirs", "prompt": "Hello"}}
    rows = [{**chat, "timestamp": 0.01 * number, "tenant": "good"} for number in range(4)]
    rows += [{**completion, "timestamp": 0.01 * number, "tenant": "bad"} for number in range(3)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    keys = ["--api-key", "good=sk-good", "--api-key", "bad=refused"]
    found = tmp_path / "found.json"
    flags = ["replay", "--url", url, "--trace", str(log), "--speed", "1", *keys, "--json", str(found)]
    monkeypatch.setattr(sys, "argv", flags)
    main()
    assert Counter({("/v1/chat/completions", "sk-good"): 4, ("/v1/completions", "refused"): 3}) == ASKED
    row = json.loads(found.read_text())["results"]["url"]
    assert (row["answered"], row["rejected"], row["failed"], row["hit_rate"]) == (4, 3, 0, "unknown")
    assert row["tenants"]["good"]["answered"] == 4 and row["tenants"]["bad"]["rejected"] == 3
    assert row["tenants"]["good"]["ttft_p99_s"] > 0 and row["tenants"]["good"]["goodput_rps"] > 0
    assert "sk-good" not in json.dumps(json.loads(found.read_text())["settings"])
