"""The application without Ray: what it publishes of itself, and errors in the API's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from router.protocol.samples import Sample
from serve_app.api.openai.response import model_body
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry
from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import AdapterSpec
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.routes.application import BODIES, make_application
from serve_app.ingress.services import Services
from serve_app.tenants.tenants import Tenants, make_api_key
from serve_app.usage.ledger import Counts, UsageKey
from serve_app.usage.report import Rows

ACME = TenantConfig(name="acme", key_sha256=["a" * 64])


def get(
    path: str,
    config: AppConfig,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: str = "",
    adapters: Sequence[AdapterEntry] = (),
    usage: Usage | None = None,
) -> httpx.Response:
    """Ask an application that has nothing behind it but its settings and the guard."""
    tenants = Tenants(config.tenants, b"s" * 32, operator_key_sha256=config.operator_key_sha256)
    guard = RouteGuard(tenants, IngressMetrics(), Drain(), allowed_hosts=config.allowed_hosts)
    parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(Services))
    registry = AdapterRegistry("demo")
    registry.merge(adapters)
    parts |= {"config": config, "tenants": tenants, "guard": guard, "adapters": registry}
    parts |= {"drain": Drain(), "usage": usage}
    services = Services(**parts | {"base_model": model_body("demo", 0, 4096)})

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_application(services))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers, content=body)

    return asyncio.run(ask())


def references(document: Any) -> set[str]:
    """Every ``$ref`` in a schema."""
    if isinstance(document, dict):
        own = {document["$ref"]} if "$ref" in document else set()
        return own.union(*map(references, document.values()))
    return set().union(*map(references, document)) if isinstance(document, list) else set()


def test_the_schema_names_the_real_bodies() -> None:
    """Every POST with a body refers to its model, and every reference leads somewhere."""
    schema = get("/openapi.json", AppConfig()).json()
    schemas = schema["components"]["schemas"]
    bodies = {
        path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path, operations in schema["paths"].items()
        if "requestBody" in operations.get("post", {})
    }
    assert bodies == {
        "/v1/chat/completions": "ChatBody",
        "/v1/completions": "CompletionBody",
        "/v1/responses": "ResponsesBody",
        "/v1/messages": "MessagesBody",
        "/v1/messages/count_tokens": "CountTokensBody",
        "/v1/load_lora_adapter": "LoadAdapterBody",
        "/v1/unload_lora_adapter": "UnloadAdapterBody",
        "/v1/cache/explain": "ExplainBody",
        **{f"/v1/prompts/{change}": "PromptBody" for change in ("warm", "promote", "rollback")},
    }
    assert {reference.removeprefix("#/components/schemas/") for reference in references(schema)} <= set(schemas)
    for body in BODIES:
        assert set(schemas[body.__name__]["properties"]) == set(body.model_fields)
    assert set(schemas["Message"]["required"]) == {"role"}
    assert schemas["ChatBody"]["properties"]["temperature"]["maximum"] == 2


def test_no_route_has_fastapis_own_errors() -> None:
    """A 422 in FastAPI's shape would be promised, if FastAPI parsed anything."""
    schema = get("/openapi.json", AppConfig()).json()
    taken = {
        (path, status)
        for path, operations in schema["paths"].items()
        for operation in operations.values()
        for status in operation["responses"]
        if not path.endswith("{model}")  # any text is a model's name: nothing to refuse
    }
    assert {status for _, status in taken} == {"200"}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (AppConfig(), True),
        (AppConfig(tenants=[ACME]), False),
        (AppConfig(enable_docs=False), False),
        (AppConfig(enable_docs=True, tenants=[ACME]), True),
    ],
    ids=["open", "tenants", "off", "on with tenants"],
)
def test_docs_are_there_where_the_settings_say_so(config: AppConfig, published: bool) -> None:
    """Where they are off, their paths are unknown like any other."""
    for path in ("/openapi.json", "/docs"):
        response = get(path, config)
        assert response.status_code == (200 if published else 404)
        if not published:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models", 401), ("GET", "/redoc", 404),
     ("POST", "/reset_prefix_cache", 401), ("POST", "/v1/chat/completions", 401), ("GET", "/v1/cache/state", 401),
     ("GET", "/metrics", 401), ("POST", "/v1/load_lora_adapter", 401)],
)  # fmt: skip
def test_errors_have_openais_shape(method: str, path: str, status: int) -> None:
    """Wrong paths and methods, and everything that needs a key."""
    response = get(path, AppConfig(tenants=[ACME]), method)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
        ("/v1/health", "did you mean /health?"),
        ("/v1/docs", "GET /v1/models lists what is served."),
        ("/v1/completions", "GET is not allowed on /v1/completions; use POST."),
    ],
)
def test_a_wrong_base_url_is_told_the_right_path(path: str, advice: str) -> None:
    """What is not published by itself is not told either."""
    assert get(path, AppConfig()).json()["error"]["message"].endswith(advice)


def test_the_version_is_told_to_everybody() -> None:
    assert get("/version", AppConfig(tenants=[ACME])).json() == {"version": version("warmpath-serve")}


class Usage:
    """Remembers for whom it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None]] = []

    async def everywhere(self, first_day: str, last_day: str, tenant: str | None) -> Rows:
        self.asked.append((first_day, last_day, tenant))
        return [(UsageKey(last_day, tenant or "all", "demo", ""), Counts(requests=1))]


def test_usage_is_a_tenants_own_and_the_operators_to_see_whole() -> None:
    """Without a key there is none; what the query asks wrongly is a 400."""
    (operator, operator_hash), (key, key_hash), usage = make_api_key(), make_api_key(), Usage()
    tenant = TenantConfig.model_validate({"name": "acme", "key_sha256": [key_hash]})
    config = AppConfig(tenants=[tenant], operator_key_sha256=[operator_hash])

    def ask(query: str, key: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return get(f"/v1/usage{query}", config, headers=headers, usage=usage)

    week = "?start_date=2027-01-25&end_date=2027-01-31"
    assert ask(week).status_code == 401
    assert ask(week, key).json()["data"][0]["tenant"] == "acme"
    assert "2027-01-31,all,demo" in ask(week + "&format=csv", operator).text
    assert usage.asked == [("2027-01-25", "2027-01-31", "acme"), ("2027-01-25", "2027-01-31", None)]
    for wrong in ("?format=xml", "?start_date=yesterday"):
        assert ask(wrong, key).status_code == 400


def test_a_tenant_sees_the_models_that_it_may_use() -> None:
    """Any other is a 404 like one that nobody serves, and the base is not named as an adapter's parent either."""
    key, digest = make_api_key()
    headers = {"authorization": f"Bearer {key}"}
    adapter = AdapterEntry("pirate", AdapterSpec("pirate", "0", "/lora/pirate"))
    for names, seen in ((None, ["demo", "pirate"]), (["demo"], ["demo"]), (["pirate"], ["pirate"])):
        config = AppConfig(
            tenants=[TenantConfig.model_validate({"name": "a", "key_sha256": [digest], "models": names})]
        )
        listed = get("/v1/models", config, headers=headers, adapters=[adapter])
        assert [model["id"] for model in listed.json()["data"]] == seen
        for name in ("demo", "pirate"):
            one = get(f"/v1/models/{name}", config, headers=headers, adapters=[adapter])
            missing = get("/v1/models/none", config, headers=headers, adapters=[adapter])
            if name in seen:
                assert one.json()["id"] == name
            else:
                assert (one.status_code, one.text) == (404, missing.text.replace("none", name))
                assert name not in listed.text


def test_an_operator_sees_one_model_as_it_sees_all() -> None:
    """Also where a key is needed: an operator's is no tenant's."""
    key, digest = make_api_key()
    config = AppConfig(model="demo", tenants=[ACME], operator_key_sha256=[digest])
    headers = {"authorization": f"Bearer {key}"}
    assert get("/v1/models/demo", config, headers=headers).json()["id"] == "demo"
    unknown = get("/v1/models/gpt", config, headers=headers)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert get("/v1/models/demo", config).status_code == 401


def test_a_trailing_slash_redirects_nowhere() -> None:
    """A redirect would lead to the host that the client names."""
    answer = get("/v1/chat/completions/", AppConfig(), "POST", {"host": "elsewhere.example"})
    assert answer.status_code == 404
    assert "location" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/reset_prefix_cache",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/cache/explain",
    ],
)
def test_pages_of_other_sites_post_nowhere(path: str) -> None:
    """Where nobody needs a key, a page in the operator's browser has none of the operator's rights. (docs/port.md)"""
    page = {"origin": "http://evil.example", "host": "127.0.0.1:8000", "content-type": "text/plain"}
    refused = get(path, AppConfig(), "POST", page, "{}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")
    rebound = page | {"host": "evil.example", "content-type": "application/json"}
    refused = get(path, AppConfig(allowed_hosts=[]), "POST", rebound, "{}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    assert "allowed_hosts" in refused.json()["error"]["message"]


def test_docs_go_when_tenants_come() -> None:
    """The application is made once; what is published follows the settings."""
    parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(Services))
    services = Services(**parts | {"config": AppConfig(), "drain": Drain()})
    application = make_application(services)

    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [(await client.get(path)).status_code for path in ("/openapi.json", "/docs")]

    assert asyncio.run(statuses()) == [200, 200]
    services.config = AppConfig(tenants=[ACME])
    assert asyncio.run(statuses()) == [404, 404]


def test_public_metrics_name_tenants_to_operators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no operator key, a tenant too, sees sums; without ``metrics_public`` nothing at all. (docs/tenants.md)"""
    (operator, operator_hash), (key, key_hash) = make_api_key(), make_api_key()
    acme = TenantConfig(name="acme", key_sha256=[key_hash])
    closed = AppConfig(tenants=[acme], operator_key_sha256=[operator_hash])
    public = closed.model_copy(update={"metrics_public": True})

    async def all_samples(services: Services) -> list[Sample]:
        return [("warmpath_tenant_prompt_tokens_total", (("ingress", "i"), ("tenant", "acme")), 3.0)]

    monkeypatch.setattr(Services, "all_samples", all_samples)
    summed, named = b'total{ingress="i"} 3.0\n', b'total{ingress="i",tenant="acme"} 3.0\n'
    for config, headers, status, shown in (
        (public, {}, 200, summed),
        (public, {"authorization": f"Bearer {key}"}, 200, summed),
        (public, {"authorization": f"Bearer {operator}"}, 200, named),
        (closed, {"authorization": f"Bearer {operator}"}, 200, named),
        (closed, {"authorization": f"Bearer {key}"}, 403, b"operator key"),
        (closed, {}, 401, b""),
    ):
        answer = get("/metrics", config, headers=headers)
        assert answer.status_code == status
        assert shown in answer.content
        assert (b"acme" in answer.content) == (shown is named)


def test_operators_are_told_of_a_refused_user_config_where_they_look_first() -> None:
    """By /health, which stays green: the settings before are in force. Nobody else is told. (docs/cluster.md)"""
    operator, operator_hash = make_api_key()
    parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(Services))
    tenants = Tenants([ACME], b"s" * 32, operator_key_sha256=[operator_hash])
    ready = SimpleNamespace(now=lambda: (True, 2))
    parts |= {"config": AppConfig(tenants=[ACME]), "drain": Drain(), "health": ready}
    parts |= {"guard": RouteGuard(tenants, IngressMetrics(), Drain()), "refused_settings": ""}
    services = Services(**parts)

    async def health(headers: dict[str, str]) -> dict[str, Any]:
        transport = httpx.ASGITransport(make_application(services))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.get("/health", headers=headers)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found

    well = {"status": "ok", "replicas": 2}
    for why in ("", "policy must be one of lmetric"):
        services.refused_settings = why
        assert asyncio.run(health({})) == well
        told = asyncio.run(health({"authorization": f"Bearer {operator}"}))
        assert told == (well | {"refused_user_config": why} if why else well)
