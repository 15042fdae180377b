"""Orders to Ray Serve that a client sends are dropped before Ray reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve._private.http_util import _apply_middlewares, parse_disconnect_disabled_header
from ray.serve._private.utils import call_function_from_import_path

from serve_app.cli.local_ray import CLIENT_HEADERS
from serve_app.ingress.client_headers import client_headers

KEPT = [(b"host", b"x"), (b"authorization", b"Bearer k"), (b"traceparent", b"00-1-2-01")]


def seen_by_ray(headers: list[tuple[bytes, bytes]]) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
    """The headers of a request as Ray's code gets them, and of the answer, in Ray's order of middlewares."""
    seen: list[Any] = []
    answered: dict[bytes, bytes] = {}

    async def rays_code(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        answered.update(message["headers"])

    async def receive() -> Any:
        raise AssertionError

    application = _apply_middlewares(rays_code, call_function_from_import_path(CLIENT_HEADERS))
    asyncio.run(application({"type": "http", "headers": list(headers)}, receive, send))
    return seen, {name.lower(): value for name, value in answered.items()}


@pytest.mark.parametrize(
    "header",
    [
        (b"x-request-timeout-seconds", b"0.001"),
        (b"x-request-timeout-seconds", b"\xff"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"serve_multiplexed_model_id", b"other"),
        (b"Serve-Multiplexed-Model-Id", b"\xff"),
        (b"x-session-id", b"\xff"),
        (b"x_session_id", b"other"),
        (b"x-serve-router-target", b"other"),
    ],
)
def test_rays_headers_are_dropped(header: tuple[bytes, bytes]) -> None:
    """In every spelling that Ray accepts; all else stays."""
    seen, _ = seen_by_ray([*KEPT[:1], header, *KEPT[1:]])
    assert [one for one in seen if one[0] != b"x-request-id"] == KEPT
    assert not parse_disconnect_disabled_header(dict(seen))


@pytest.mark.parametrize("value", [b"\xff\xfe", b"", b"two words", b"x" * 129, b"a\x01b"])
def test_an_invalid_request_id_is_replaced(value: bytes) -> None:
    """Ray would fail to read it, or to answer with it; it makes one of its own."""
    seen, answered = seen_by_ray([*KEPT, (b"x-request-id", value)])
    made = dict(seen)[b"x-request-id"]
    assert made not in (value, b"")
    assert answered[b"x-request-id"] == made
    assert client_headers([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) == []


def test_a_clients_request_id_comes_back() -> None:
    """One printable word of up to 128 bytes."""
    for value in (b"req-1", b"x" * 128):
        assert seen_by_ray([(b"x-request-id", value)])[1][b"x-request-id"] == value
