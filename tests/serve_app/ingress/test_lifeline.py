"""A stream that waits shows that it lives, and whoever leaves is counted once, in every API."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from serve_app.api.format import SIGN
from serve_app.errors import LimitReason, Overloaded, RateLimited
from serve_app.ingress import lifeline
from tests.serve_app.ingress.apis import APIS
from tests.serve_app.ingress.scripted import PATIENCE_S, Script

WAYS = {api.path.split("/")[2]: (api.path.removeprefix("/v1/"), api.body) for api in APIS}
SIGNS = {api: b'event: ping\ndata: {"type":"ping"}\n\n' if api == "messages" else SIGN for api in WAYS}
REASON = LimitReason("router", "max_waiting_requests")


@pytest.fixture
def waiting(script: Script) -> Iterator[Script]:
    """An ingress whose clients wait long after milliseconds, and whose answers wait for ``Script.end``."""
    script.text, script.ends = "It rains in Oslo, and the sun shines elsewhere.", asyncio.Semaphore(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HEAD_AFTER_S", "SIGN_EVERY_S"):
            patch.setattr(lifeline, name, 0.01)
        yield script


@contextmanager
def asking(url: str, api: str, stream: bool = True, **fields: Any) -> Iterator[socket.socket]:
    """Yield a connection on which one of an API's requests was sent."""
    path, body = WAYS[api]
    content = json.dumps({"model": "demo", "stream": stream, **body, **fields}).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield connection


def read_until(connection: socket.socket, found: re.Pattern[bytes], read: bytes = b"") -> bytes:
    """Return what arrives until it matches."""
    while not found.search(read):
        part = connection.recv(65536)
        assert part, read
        read += part
    return read


def test_silence_is_shorter_than_the_patience_of_clients() -> None:
    """Proxies and clients give up after 60 s, some after 15 s, without a byte."""
    assert lifeline.HEAD_AFTER_S <= 4.5 and 2 * lifeline.SIGN_EVERY_S < 15
    assert lifeline.HEAD_AFTER_S < 5 < lifeline.HEAD_AFTER_S + lifeline.NEAR_REFUSAL_S < 6


@pytest.mark.parametrize("api", WAYS)
def test_a_stream_that_waits_lives(hermes: tuple[str, Script], waiting: Script, api: str) -> None:
    """It has its head and one sign after another before its first event; the events are as without a wait."""
    sign = re.escape(SIGNS[api])
    with asking(hermes[0], api, unknown=1) as connection:
        read = read_until(connection, re.compile(rb"(%b.*){3}" % sign, re.DOTALL))
        assert read.startswith(b"HTTP/1.1 200 OK\r\n") and b"x-warmpath-warning: " in read
        assert (b"request-id: " in read.replace(b"x-request-id", b"")) == (api == "messages")
        assert b"data: {" not in read.replace(SIGNS[api], b"")
        waiting.end()
        read = read_until(connection, re.compile(rb"\r\n0\r\n\r\n$"), read)
    body = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", read.partition(b"\r\n\r\n")[2])
    events = body.replace(SIGNS[api], b"").partition(b"\r\n")[2].removesuffix(b"\r\n\r\n")
    waiting.ends = None
    path, asked = WAYS[api]
    found = httpx.post(f"{hermes[0]}/v1/{path}", json={"model": "demo", "stream": True, **asked}, timeout=PATIENCE_S)
    assert plain(events.decode()) == plain(found.text)


def plain(events: str) -> str:
    """Return events without what differs by answer."""
    return re.sub(r"[0-9a-zA-Z]{24,}|\"(created|created_at|completed_at)\":[0-9.]+", "", events).strip()


@pytest.mark.parametrize("api", WAYS)
def test_a_stream_refused_after_its_head_ends_with_an_error_of_the_api(
    hermes: tuple[str, Script], waiting: Script, api: str
) -> None:
    """It is counted by the status that it would have had; a refusal before has that status."""
    waiting.text, waiting.fails = "", RateLimited("Later.", retry_after_s=1, reason=REASON)
    before = waiting.metrics().values.copy()
    with asking(hermes[0], api) as connection:
        read = read_until(connection, re.compile(re.escape(SIGNS[api])))
        waiting.end()
        read = read_until(connection, re.compile(rb"\r\n0\r\n\r\n$"), read)
    assert read.startswith(b"HTTP/1.1 200 OK\r\n")
    (event,) = re.findall(rb'data: (\{.*"error".*\})\n\n', read)
    told = json.loads(event)["error"]
    assert (told["message"], told["type"]) == ("Later.", "rate_limit_error")
    assert told["reason"]["limit"] == "max_waiting_requests"
    assert read.rpartition(b"event: ")[2].startswith(b"error\n") == (api in ("messages", "responses"))
    tenant = ("tenant", "default")
    whole = "warmpath_requests_total", (("endpoint", api), ("status", "200"), tenant)
    eventually(lambda: waiting.metrics().values[whole] > before.get(whole, 0))
    limit = "warmpath_refusals_total", (("limit", "max_waiting_requests"), ("place", "router"), tenant)
    broken = "warmpath_broken_streams_total", (("status", "429"), tenant)
    assert [waiting.metrics().values[key] - before.get(key, 0) for key in (whole, broken, limit)] == [1, 1, 1]


def test_real_clients_read_past_signs_and_raise_late_refusals(
    waiting: Script, client: OpenAI, anthropic_client: Anthropic
) -> None:
    """The official packages do not see the signs, and raise a refused stream's error."""
    said: Any = [{"role": "user", "content": "Hi"}]

    def ask(api: str) -> str:
        if api == "messages":
            with anthropic_client.messages.stream(model="demo", max_tokens=60, messages=said) as stream:
                release(stream.response)
                return "".join(stream.text_stream)
        if api == "responses":
            events = client.responses.create(model="demo", input="Hi", stream=True)
            release(events.response)
            return "".join(event.delta for event in events if event.type == "response.output_text.delta")
        chunks = client.chat.completions.create(model="demo", messages=said, stream=True)
        release(chunks.response)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def release(response: httpx.Response) -> None:
        assert response.status_code == 200  # its head is there, and its answer is not
        waiting.end()

    for api in ("chat", "responses", "messages"):
        assert ask(api) == waiting.text
    waiting.text, waiting.fails = "", Overloaded("No replica.")
    for api in ("chat", "responses", "messages"):
        with pytest.raises((openai.APIError, anthropic.APIStatusError), match=r"No replica\."):
            ask(api)


@pytest.mark.parametrize(("moment", "stream"), [("waits", False), ("waits", True), ("begun", True)])
@pytest.mark.parametrize("api", WAYS)
def test_a_client_that_leaves_is_counted_once(
    hermes: tuple[str, Script], script: Script, api: str, moment: str, stream: bool
) -> None:
    """As 499, before and after its stream has begun. Serve cancels its request, beside what listens for it here."""
    script.text, script.holds, script.ends = "It rains in Oslo, and nowhere else.", True, asyncio.Semaphore(0)
    asked, before = len(script.asked), script.metrics().values.copy()
    status = ("endpoint", api), ("status", "499"), ("tenant", "default")

    def grown() -> dict[Any, float]:
        return {key: more for key, value in script.metrics().values.items() if (more := value - before.get(key, 0))}

    with asking(hermes[0], api, stream) as connection:
        eventually(lambda: len(script.asked) > asked)
        if moment == "begun":
            script.end()
            read_until(connection, re.compile(rb"data: {"))
    eventually(lambda: not script.metrics().values["warmpath_requests_in_flight", ()])
    eventually(lambda: grown().get(("warmpath_requests_total", status)))
    counted = {key: more for key, more in grown().items() if key[0] == "warmpath_requests_total"}
    assert counted == {("warmpath_requests_total", status): 1}
    assert grown()["warmpath_client_disconnects_total", ()] == 1


def eventually(holds: Callable[[], object]) -> None:
    """Wait until something in the ingress' thread has happened."""
    over_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < over_s
        time.sleep(0.005)
