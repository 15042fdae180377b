"""Who may see what in the application beside Ray's, without Ray: a configured operator's key is always needed."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serve_app.ray_llm.cache_app import OPERATOR_KEY, CacheApp
from serve_app.ray_llm.scopes import Scopes
from tests.router.cores import core_of

pytestmark = pytest.mark.anyio

SNAPSHOT, STATE = "/v1/cache/events?once=true", "/v1/cache/state"
ALL, OWN = "operator", "tenant"


def app_of(tenant_header: str, monkeypatch: pytest.MonkeyPatch, operator: str = "") -> Any:
    """Return the application over a router with two replicas, as an ASGI application."""
    monkeypatch.setenv("WARMPATH_SECRET", "a secret of this test")
    monkeypatch.setenv(OPERATOR_KEY, operator)
    scopes, core = Scopes("m", tenant_header), core_of("ab")
    router = SimpleNamespace(knows_every_cache=True, core=core, tenant=scopes.tenant_in, model="m")
    beside = CacheApp("llm", "server", "/")
    monkeypatch.setattr(beside, "_router", lambda: router)

    async def none(*_: Any, **__: Any) -> list[Any]:
        return []

    monkeypatch.setattr(beside, "_look", none)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        await (await beside(Request(scope, receive)))(scope, receive, send)

    return application


async def get(application: Any, path: str, headers: list[tuple[str, str]]) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://test") as client:
        return await client.get(path, headers=headers)


@pytest.mark.parametrize(
    ("tenant_header", "operator", "key", "sees"),
    [
        ("authorization", "", "", OWN), ("authorization", "", "a", OWN),
        ("authorization", "op", "", OWN), ("authorization", "op", "a", OWN), ("authorization", "op", "op", ALL),
        ("", "", "", ALL), ("", "", "a", ALL),
        ("", "op", "", None), ("", "op", "a", None), ("", "op", "op", ALL),
        ("x-tenant", "op", "op", ALL), ("x-tenant", "op", "a", OWN),
    ],
)  # fmt: skip
async def test_a_configured_operators_key_is_always_needed(
    tenant_header: str, operator: str, key: str, sees: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tenants too; where nobody has a key, everybody sees all."""
    application = app_of(tenant_header, monkeypatch, operator)
    headers = [("authorization", f"Bearer {key}")] if key else []
    seen, state, metrics = [await get(application, path, headers) for path in (SNAPSHOT, STATE, "/metrics")]
    if sees is None:
        assert [answer.status_code for answer in (seen, state, metrics)] == [401] * 3
        assert OPERATOR_KEY in seen.text and "replicas" not in seen.json()
    else:
        assert seen.json()["viewer"] == sees
        assert state.status_code == metrics.status_code == (200 if sees == ALL else 403)


async def test_a_viewer_who_names_two_tenants_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    application = app_of("x-tenant", monkeypatch)
    refused = await get(application, SNAPSHOT, [("x-tenant", "a"), ("x-tenant", "b")])
    assert refused.status_code == 400 and "x-tenant" in refused.json()["error"]["message"]
    assert (await get(application, "/", [])).status_code == 200, "the page needs no key"
