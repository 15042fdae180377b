"""Clients that wait long, leave early or speak old HTTP, on real Ray Serve behind HAProxy (simulated engine)."""

import gzip
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.conftest import HTTP, PATIENCE_S, eventually, metric
from tests.integration.test_start_and_stop import Serving, serving_once_started
from tests.serve_app.ingress.test_lifeline import SIGNS

pytestmark = [pytest.mark.integration, pytest.mark.long]

LONG = {api: f"Some words of {api}. " * 300 for api in ("chat", "completions", "responses", "messages")}
"""Each has its own, which is nowhere cached."""
ASKED = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": LONG["chat"]}], "max_tokens": 4}),
    "completions": ("completions", {"prompt": LONG["completions"], "max_tokens": 4}),
    "responses": ("responses", {"input": LONG["responses"], "max_output_tokens": 4}),
    "messages": ("messages", {"messages": [{"role": "user", "content": LONG["messages"]}], "max_tokens": 4}),
}


@pytest.fixture(scope="module")
def slow() -> Iterator[Serving]:
    """An instance that computes the prompts above for over ten seconds; it ends as by Ctrl-C."""
    with serving_once_started("--set=simulated_prefill_tokens_per_s=100", "--keep-alive-timeout-s=77") as instance:
        yield instance
        instance.process.send_signal(signal.SIGINT)
        assert instance.end().endswith("stopped\n")


@pytest.mark.parametrize("api", ASKED)
def test_a_long_prompt_lives_and_who_leaves_is_counted(slow: Serving, api: str) -> None:
    """Head and sign come before the first event; a client that leaves is a 499, whether it wants a stream or not."""
    path, body = ASKED[api]
    url = f"{slow.url}/v1/{path}"
    assert not left_early(slow.url, api)
    with suppress(httpx.ReadTimeout):
        HTTP.post(url, json={"model": "demo", **body}, timeout=3)
    eventually(lambda: left_early(slow.url, api) == 1)
    left = metric(slow.url, "warmpath_client_disconnects_total")
    with HTTP.stream("POST", url, json={"model": "demo", "stream": True, **body}, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        first = next(part for part in answer.iter_raw() if part)
        assert first.startswith(SIGNS[api])
    eventually(lambda: left_early(slow.url, api) == 2)
    eventually(lambda: metric(slow.url, "warmpath_client_disconnects_total") == left + 1)


def left_early(url: str, api: str) -> float:
    """Return the number of requests whose client left."""
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("warmpath_requests_total{") and f'endpoint="{api}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found if 'status="499"' in line)


def test_a_stream_in_http_1_0_ends_with_its_connection(slow: Serving) -> None:
    """And it has no chunks."""
    host, port = urlsplit(slow.url).hostname, urlsplit(slow.url).port
    body = json.dumps({"model": "demo", "prompt": "Hi", "stream": True, "max_tokens": 3}).encode()
    with socket.create_connection((host, port), PATIENCE_S) as connection:
        head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nHost: localhost"
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        told = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, events = told.decode().partition("\r\n\r\n")
    assert head.startswith(("HTTP/1.1 200", "HTTP/1.0 200")) and "transfer-encoding" not in head.lower()
    assert events.startswith("data: {") and events.endswith("data: [DONE]\n\n")


def test_heads_methods_and_compressed_bodies(slow: Serving) -> None:
    """As through any proxy, and the connection is good for the next request."""
    assert (HTTP.head(f"{slow.url}/health").status_code, HTTP.options(f"{slow.url}/health").status_code) == (200, 204)
    assert HTTP.head(f"{slow.url}/v1/cache/events").headers["content-type"].startswith("text/event-stream")
    assert HTTP.delete(f"{slow.url}/health").headers["allow"] == "GET, HEAD, OPTIONS"
    body = gzip.compress(json.dumps({"model": "demo", "prompt": "Hi", "max_tokens": 1}).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    assert HTTP.post(f"{slow.url}/v1/completions", content=body, headers=headers).status_code == 200
    refused = HTTP.post(f"{slow.url}/v1/completions", content=body, headers={**headers, "content-encoding": "br"})
    assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip")
