"""A request that names two tenants is refused on both of Ray's paths, in vLLM's application and in Ray's ingress."""

import sys
from functools import partial
from types import ModuleType

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from serve_app.ray_compat import check_llm_headers
from serve_app.ray_llm.scopes import Scopes
from serve_app.ray_llm.tenant_header import RepeatedTenant, TenantMiddleware, only_value

ONE, TWO = [("X-Tenant", "a")], [("X-Tenant", "a"), ("x-tenant", "b")]


def test_direct_streaming_refuses_a_request_that_names_two_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """In OpenAI's shape, before vLLM sees it. Other requests are noted once each."""
    monkeypatch.setenv("WARMPATH_SECRET", "a secret of this test")
    scopes, noted = Scopes("m", "x-tenant"), list[str]()

    async def answer(_: Request) -> PlainTextResponse:
        return PlainTextResponse("answered")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    app.add_middleware(TenantMiddleware, note=lambda headers: noted.append(scopes.tenant_in(headers)))
    with TestClient(app) as client:
        refused = client.post("/v1/chat/completions", headers=TWO)
        assert (refused.status_code, set(refused.json()["error"])) == (400, {"message", "type", "param", "code"})
        assert "x-tenant" in refused.json()["error"]["message"]
        assert noted == []
        assert client.post("/v1/chat/completions", headers=ONE).text == "answered"
        assert client.post("/v1/chat/completions", headers=[*ONE, *ONE]).text == "answered", "both name the same one"
    assert noted == [scopes.tenant_of("a")] * 2


@pytest.mark.anyio
async def test_a_websocket_that_names_two_tenants_is_closed() -> None:
    """The start of the application itself has no headers."""
    begun, sent = list[str](), list[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["type"])

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    middleware = TenantMiddleware(app, lambda headers: only_value(headers, "x-tenant") and None)
    for headers in (ONE, TWO):
        raw = [(name.lower().encode(), value.encode()) for name, value in headers]
        await middleware({"type": "websocket", "headers": raw}, receive, send)
    await middleware({"type": "lifespan"}, receive, send)
    assert begun == ["websocket", "lifespan"]
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]


def test_rays_ingress_sees_every_header_before_it_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray's LLM ingress in this process there is nothing to check; two routers there check both."""
    check_llm_headers(list)

    class RawRequestInfo:
        """As Ray's: of equal headers it has the first."""

        def __init__(self, headers: dict[str, str]) -> None:
            self.headers = headers

        @classmethod
        def from_starlette_request(cls, request: Request) -> "RawRequestInfo":
            return cls(dict(request.headers))

    module = ModuleType("ray.llm._internal.serve.core.protocol")
    module.RawRequestInfo = RawRequestInfo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def passed_on(headers: list[tuple[str, str]]) -> dict[str, str]:
        raw = Headers(raw=[(name.lower().encode(), value.encode()) for name, value in headers]).raw
        return RawRequestInfo.from_starlette_request(Request({"type": "http", "headers": raw})).headers

    for name in ("x-tenant", "x-other"):
        check_llm_headers(partial(only_value, name=name))
        assert passed_on(ONE) == {"x-tenant": "a"}
        with pytest.raises(RepeatedTenant):
            passed_on(TWO)
