"""Whatever a client sends, it gets a 4xx with a sentence, and others go on undisturbed."""

from __future__ import annotations

import asyncio
import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.conftest import PATIENCE_S
from tests.integration.demo.conftest import Second

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
GOOD = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}

BAD_BODIES = {
    "empty": b"",
    "broken json": b'{"model": "demo", ',
    "not an object": b"[1, 2]",
    "null": b"null",
    "invalid utf-8": b'{"model": "demo", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "lone surrogate": b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "messages is a string": json.dumps({**GOOD, "messages": "hello"}).encode(),
    "message without role": json.dumps({**GOOD, "messages": [{"content": "x"}]}).encode(),
    "temperature NaN": b'{"model":"demo","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "temperature Infinity": b'{"model":"demo","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
    "negative max_tokens": json.dumps({**GOOD, "max_tokens": -1}).encode(),
    "max_tokens is text": json.dumps({**GOOD, "max_tokens": "many"}).encode(),
    "huge integer": b'{"model":"demo","messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 400 + b"}",
    "deep nesting": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "cache_salt empty": json.dumps({**GOOD, "cache_salt": ""}).encode(),
    "too many tokens": json.dumps({**GOOD, "messages": [{"role": "user", "content": "word " * 60_000}]}).encode(),
    "ten megabytes": b'{"model": "demo", "messages": [{"role": "user", "content": "' + b"a" * 10_000_000 + b'"}]}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_bodies_are_refused_with_a_sentence(url: str, name: str) -> None:
    """Status 4xx, OpenAI's error shape, a request id, no trace of the inside."""
    response = httpx.post(
        url + CHAT, content=BAD_BODIES[name], headers={"content-type": "application/json"}, timeout=PATIENCE_S
    )
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 10
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    assert httpx.post(url + CHAT, json=GOOD, timeout=PATIENCE_S).status_code == 200


def test_wrong_paths_and_methods(url: str) -> None:
    """Unknown paths are 404 and wrong methods 405, in OpenAI's shape."""
    for path, status in (("/v1/nothing", 404), (CHAT, 405), ("/v1/models/none", 404)):
        response = httpx.get(url + path, timeout=PATIENCE_S)
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_a_chunked_flood_is_cut_off(url: str) -> None:
    """A body without a length is refused once it passes the bound, not buffered whole."""

    def flood() -> object:
        for _ in range(400):
            yield b"x" * 65536

    try:
        response = httpx.post(url + CHAT, content=flood(), timeout=PATIENCE_S)  # type: ignore[arg-type]
        assert response.status_code == 413
    except (httpx.WriteError, httpx.RemoteProtocolError):
        pass  # the server may close on us while we still send
    assert httpx.post(url + CHAT, json=GOOD, timeout=PATIENCE_S).status_code == 200


def test_a_half_sent_request_harms_nobody(url: str) -> None:
    """A client that stops in the middle of its body does not hold up others."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as half:
        half.sendall(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        assert httpx.post(url + CHAT, json=GOOD, timeout=PATIENCE_S).status_code == 200


def test_good_requests_are_unharmed_by_bad_ones(url: str) -> None:
    """Good answers are the same whether or not bad requests arrive at the same time."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            alone = (await client.post(CHAT, json=GOOD)).json()["choices"][0]["message"]["content"]
            bad = [client.post(CHAT, content=body) for name, body in BAD_BODIES.items() if name != "ten megabytes"]
            good = [client.post(CHAT, json=GOOD) for _ in range(12)]
            answers = await asyncio.gather(*bad, *good)
            assert all(400 <= answer.status_code < 500 for answer in answers[: len(bad)])
            for answer in answers[len(bad) :]:
                assert answer.status_code == 200
                assert answer.json()["choices"][0]["message"]["content"] == alone

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_unknown_field_is_named_and_the_answer_is_there(url: str, stream: bool) -> None:
    """A misspelt cache_salt would else be a shared cache that nobody notices."""
    body = {**GOOD, "cache_slat": "x", "user": "ann", "chat_template_kwargs": {"x": 1}, "stream": stream}
    answer = httpx.post(url + CHAT, json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200
    told = "unknown fields ignored: cache_slat (did you mean cache_salt?), chat_template_kwargs.x"
    assert answer.headers["x-warmpath-warning"] == told
    assert "x-warmpath-warning" not in httpx.post(url + CHAT, json=GOOD, timeout=PATIENCE_S).headers


def test_a_strict_instance_refuses_an_unknown_field(second: Second) -> None:
    """In OpenAI's shape, before anything is computed; what is known passes."""
    body = {**GOOD, "model": "second", "user": "ann"}
    assert httpx.post(second.url + CHAT, json=body, timeout=PATIENCE_S).status_code == 200
    answer = httpx.post(second.url + CHAT, json={**body, "cache_slat": "x"}, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "Unknown parameter: 'cache_slat'; did you mean 'cache_salt'?",
        "type": "invalid_request_error",
        "param": "cache_slat",
        "code": "unknown_parameter",
    }
