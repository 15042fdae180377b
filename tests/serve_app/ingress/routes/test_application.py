"""The application without Ray: its public pages and their visibility, and errors in the API's format."""

import asyncio
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from router import __version__
from router.background import BackgroundLoops
from router.protocol.events import StatsReport
from router.protocol.samples import Sample
from serve_app.budgets import Budgets
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry
from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import AdapterSpec
from serve_app.errors import InvalidRequest
from serve_app.ingress import documents
from serve_app.ingress.address import Address
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.routes.application import PATHS, Direct, make_application
from serve_app.ingress.routes.handler import BODIES
from serve_app.ingress.routes.page import HEADERS
from serve_app.tenants import Tenants, make_api_key
from serve_app.usage import Counts, UsageKey, UsageRows
from tests.serve_app.ingress.scripted import partial_address, scripted

(OPERATOR, OPERATOR_DIGEST), (KEY, DIGEST) = make_api_key(), make_api_key()
ACME = TenantConfig(name="acme", key_sha256=[DIGEST])
CLOSED = AppConfig(model="demo", tenants=[ACME], operator_key_sha256=[OPERATOR_DIGEST])
FILE = "/docs/swagger-ui.css"
PAGE = {"origin": "http://evil.example", "host": "127.0.0.1:8000", "content-type": "text/plain"}


def address_of(config: AppConfig, adapters: Sequence[AdapterEntry] = (), **parts: Any) -> Address:
    """Return an ingress with only its settings, the guard and the given parts."""
    tenants = Tenants(config.tenants, b"s" * 32, operator_key_sha256=config.operator_key_sha256)
    guard = RouteGuard(tenants, IngressMetrics(), Drain())
    guard.configure(config.allowed_hosts, config.allowed_origins)
    registry = AdapterRegistry("demo")
    registry.merge(adapters)
    parts |= {"tenants": tenants, "guard": guard, "budgets": Budgets(config.tenants, config.prices, None)}
    return partial_address(config, registry, **parts)


def ask(application: Any, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers, content="{}" if method == "POST" else "")

    return asyncio.run(answer())


def get(
    path: str, address: Address | AppConfig, method: str = "GET", headers: dict[str, str] | None = None, key: str = ""
) -> httpx.Response:
    headers = {**(headers or {}), **({"authorization": f"Bearer {key}"} if key else {})}
    return ask(application_of(address), path, method, headers)


MADE: list[tuple[Address | AppConfig, Any]] = []
"""Applications that tests have made."""


def application_of(address: Address | AppConfig) -> Any:
    """Return the application of this address, or of one with these settings alone."""
    for given, application in MADE:
        if given is address or (isinstance(address, AppConfig) and given == address):
            return application
    made = address if isinstance(address, Address) else address_of(address)
    MADE.append((address, make_application(made)))
    return MADE[-1][1]


def test_the_schema_names_the_real_bodies_and_no_error_of_fastapis() -> None:
    """Each POST refers to its body, and each reference resolves; a 422 would mean that FastAPI parses."""
    schema = get("/openapi.json", AppConfig())
    schemas = schema.json()["components"]["schemas"]
    operations = [(path, each) for path, methods in schema.json()["paths"].items() for each in methods.values()]
    with_body = [(path, str(each["requestBody"])) for path, each in operations if "requestBody" in each]
    bodies = {path: re.findall(r"/schemas/(\w+)", body) for path, body in with_body}
    posts = set(bodies)
    administration = {path for path in posts if path.startswith("/v1/admin/")}
    assert {path.partition("{")[0] for path in administration} == {"/v1/admin/tenants", "/v1/admin/tenants/"} | {
        "/v1/admin/keys", "/v1/admin/keys/",
    }  # fmt: skip
    others = {path for method, path in (*OPERATORS, *TENANTS) if method == "POST"}
    assert {*posts, "/reset_prefix_cache"} - administration == others | {
        f"/v1/messages{more}" for more in ("", "/count_tokens", "/batches")
    }
    assert bodies["/v1/messages"] == ["MessagesBody"] and bodies["/v1/prompts/warm"] == ["PromptBody"]
    assert {name for path in posts for name in bodies[path]} == {body.__name__ for body in BODIES}
    assert set(re.findall(r"#/components/schemas/(\w+)", schema.text)) <= set(schemas)
    for body in BODIES:
        assert set(schemas[body.__name__]["properties"]) == set(body.model_fields)
    assert set(schemas["Message"]["required"]) == {"role"}
    assert schemas["ChatBody"]["properties"]["temperature"]["maximum"] == 2
    assert {scheme for need in schema.json()["security"] for scheme in need} == {
        *schema.json()["components"]["securitySchemes"]
    }
    # Any text is a model's name, or a response's id, so there is nothing to refuse.
    assert {code for path, each in operations if "{" not in path for code in each["responses"]} == {"200"}


def test_docs_follow_the_current_settings() -> None:
    """The application is made once."""
    address = address_of(AppConfig())
    application = make_application(address)
    for config, status in (
        (AppConfig(), 200),
        (AppConfig(tenants=[ACME]), 404),
        (AppConfig(enable_docs=False), 404),
        (AppConfig(enable_docs=True, tenants=[ACME]), 200),
    ):
        address.config = config
        assert {ask(application, path).status_code for path in ("/openapi.json", "/docs", FILE)} == {status}


def test_the_page_of_the_api_loads_nothing_from_elsewhere() -> None:
    """Without a network it is complete; its files answer as those of the page at / do, and no other file is there."""
    application = make_application(address_of(AppConfig()))
    answer = ask(application, "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.replace(" data:", "") == HEADERS["content-security-policy"], "pictures in the style sheet alone"
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", answer.text)
    loaded = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
    assert {"docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "page/docs.js"} <= {*loaded}
    for path in ("docs", *loaded):
        assert re.fullmatch(r"[\w./-]+", path) and not path.startswith("/"), (
            "relative: an application can have a prefix"
        )
        found = ask(application, f"/{path}")
        assert found.content and found.headers["x-content-type-options"] == "nosniff"
        head = ask(application, f"/{path}", "HEAD")
        assert (head.status_code, head.content, head.headers) == (200, b"", found.headers)
        again = ask(application, f"/{path}", headers={"if-none-match": found.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", found.headers["etag"])
    style = ask(application, "/docs/swagger-ui.css").text
    assert not [each for each in re.findall(r"(?:@import|url\()\W*(\w+:?)", style) if each != "data:"]
    for name in ("index.html", "swagger-ui.js", "..%2F__init__.py", "%2Fetc%2Fpasswd"):
        assert ask(application, f"/docs/{name}").status_code == 404


def test_a_key_opens_the_description_of_the_api() -> None:
    """Where tenants exist, and nobody turned it off."""
    for enable_docs, statuses in ((None, [200, 404]), (False, [404, 404]), (True, [200, 200])):
        application = make_application(address_of(AppConfig(tenants=[ACME], enable_docs=enable_docs)))
        headers = ({"authorization": f"Bearer {KEY}"}, {"authorization": "Bearer wp-wrong"})
        assert [ask(application, "/openapi.json", headers=one).status_code for one in headers] == statuses


OPERATORS = [
    *(("POST", f"/v1/{name}") for name in ("load_lora_adapter", "unload_lora_adapter", "cache/explain")),
    *(("POST", f"/v1/prompts/{change}") for change in ("warm", "promote", "cutover", "rollback")),
    ("POST", "/reset_prefix_cache"), ("GET", "/v1/cache/state"), ("GET", "/v1/prompts"), ("GET", "/metrics"),
]  # fmt: skip
TENANTS = [
    *(("POST", f"/v1/{name}") for name in ("chat/completions", "completions", "responses", "responses/input_tokens")),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/load"),
    ("DELETE", "/v1/sessions/one"),
    *((method, f"/v1/{name}") for name in ("files", "batches") for method in ("GET", "POST")),
    *(("GET", f"/v1/{name}") for name in ("models", "models/demo", "cache/events", "cache/sessions", "usage")),
    *(("GET", f"/v1/tenants/{name}") for name in ("stats", "acme/requests")),
]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/redoc", 404),
        ("GET", "/docs", 404),
        ("POST", "/v1/chat/completions/", 404),  # a redirect would lead to the host that the client names
        *((*route, 401) for route in (*OPERATORS, *TENANTS)),
        *((*route, 403) for route in OPERATORS),
    ],
)
def test_errors_have_openais_shape(method: str, path: str, status: int) -> None:
    """Wrong paths and methods, routes that need a key, and operators' routes for a tenant (403)."""
    response = get(path, CLOSED, method, {"host": "elsewhere.example"}, KEY if status == 403 else "")
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "location" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "why"),
    [
        *(("POST", path, "--runner pooling") for path in ("/v1/embeddings", "/embeddings", "/pooling")),
        *(("POST", f"{version}/rerank", "or ask a chat model") for version in ("", "/v1", "/v2")),
        *(("POST", path, "or ask a chat model") for path in ("/score", "/v1/score", "/classify", "/v1/moderations")),
        *(("POST", f"/v1/{path}", "a server of a model for this") for path in ("images/edits", "audio/speech")),
        ("GET", "/v1/embeddings", "--runner pooling"), ("GET", "/v1/threads/t", "keeps responses, files and batches"),
        *(("POST", f"/v1/{path}", "in your application") for path in ("agents", "skills/s/versions", "sessions/s")),
        ("GET", "/v1/chat/completions/chatcmpl-1", "/v1/responses stores"),
        ("GET", "/v1/organization/admin_api_keys", "/v1/admin/keys"),
        ("POST", "/v1/responses/compact", "ask for a summary"), ("POST", "/v1/uploads", "POST /v1/files"),
    ],
)  # fmt: skip
def test_a_route_of_the_apis_that_is_not_offered_says_why(method: str, path: str, why: str) -> None:
    """Also in an application that is not at /, as two in one file are."""
    application = make_application(address_of(AppConfig()))
    for prefix in ("", "/two"):
        mounted = functools.partial(_mounted, application, prefix)
        refused = ask(mounted, prefix + path, method)
        assert refused.status_code == 404
        assert f"There is no {path} here" in refused.json()["error"]["message"]
        assert why in refused.json()["error"]["message"]


def test_anthropics_clients_read_in_their_shape_that_a_route_is_not_offered() -> None:
    refused = get("/v1/skills", AppConfig(), headers={"anthropic-version": "2023-06-01"})
    assert (refused.status_code, refused.json()["type"]) == (404, "error")
    assert refused.json()["error"]["type"] == "not_found_error" and "request-id" in refused.headers


async def _mounted(application: Any, prefix: str, scope: Any, receive: Any, send: Any) -> None:
    """Serve below a prefix, as Ray Serve does."""
    await application({**scope, "root_path": prefix}, receive, send)


def test_a_websocket_is_refused_in_openais_shape(demo_model_path: Path) -> None:
    """OpenAI's responses have one; the answer to the handshake says what to do instead."""
    with scripted(demo_model_path) as (url, _), pytest.raises(InvalidStatus) as refused:
        connect(f"{url.replace('http', 'ws')}/v1/responses")
    answer = refused.value.response
    assert answer.status_code == 404
    assert "send POST requests" in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize("path", [path for method, path in (*OPERATORS, *TENANTS) if method == "POST"])
def test_pages_of_other_sites_post_nowhere(path: str) -> None:
    """Without keys, a page in the operator's browser has none of the operator's rights. docs: isolation"""
    refused = get(path, AppConfig(), "POST", PAGE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")


def every_route() -> list[tuple[str, str]]:
    """Return each route with a method, with a value for each part of its path."""
    routes = [route for route in make_application(address_of(AppConfig())).routes if isinstance(route, Route)]
    return [(method, re.sub(r"{.*?}", "x", route.path)) for route in routes for method in sorted(route.methods or ())]


@pytest.mark.parametrize(("method", "path"), [*every_route(), ("GET", "/nothing"), ("PATCH", "/v1/models")])
def test_no_route_answers_for_another_host(method: str, path: str) -> None:
    """A page that points its own name here reads nothing, not even what is there. docs: isolation"""
    address = address_of(AppConfig(allowed_hosts=[]))
    refused = get(path, address, method, {"host": "evil.example", "content-type": "application/json"})
    assert refused.status_code == 403
    if method != "HEAD":
        assert "allowed_hosts" in refused.json()["error"]["message"]
        assert ("type" in refused.json()) == path.startswith("/v1/messages"), "in the API's own shape"
    counted = {labels: value for name, labels, value in address.guard.metrics.samples() if "requests_total" in name}
    assert [*counted.values()] == [1.0]


def test_health_is_told_to_probes_by_address_and_without_a_host() -> None:
    """As Kubernetes asks (the pod's address), a machine's own script, and HAProxy in HTTP/1.0."""
    ready = SimpleNamespace(knows_every_cache=True, replica_ids=["a"], other_versions={}, stats=dict)
    address = address_of(AppConfig(allowed_hosts=[]), core=ready, connecting=SimpleNamespace(done=lambda: True))
    for host in ("10.1.2.3:8000", "localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert get("/health", address, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
        ("/v1/health", "did you mean /health?"),
        ("/v1/docs", "GET /docs lists the routes."),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("//v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/responses/one/", "did you mean /v1/responses/one?"),
        ("/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1/completions", "GET is not allowed on /v1/completions; use POST."),
    ],
)
def test_a_wrong_base_url_is_told_the_right_path(path: str, advice: str) -> None:
    """Unpublished paths are not revealed here either."""
    assert get(path, AppConfig()).json()["error"]["message"].endswith(advice)


READY: dict[str, Any] = {
    "core": SimpleNamespace(knows_every_cache=True, replica_ids=["a"], other_versions={}, stats=dict),
    "connecting": SimpleNamespace(done=lambda: True),
}


@pytest.mark.parametrize(
    "path", sorted({re.sub(r"{.*?}", "x", path) for path in PATHS} | {"/openapi.json", "/docs", FILE})
)
def test_head_and_options_and_wrong_methods(path: str) -> None:
    """HEAD answers as GET, without its body; other methods are refused with those that there are, as OPTIONS tells.

    RFC 9110 9.1, 9.3.2, 9.3.7, 15.5.6. A key that is missing is told the scheme (11.6.1).
    """
    address = address_of(AppConfig(), **READY)
    options = get(path, address, "OPTIONS")
    assert (options.status_code, options.content) == (204, b"")
    allowed = options.headers["allow"].split(", ")
    assert {"OPTIONS", "HEAD"} & {*allowed} == ({"OPTIONS", "HEAD"} if "GET" in allowed else {"OPTIONS"})
    for method in ("PUT", "PATCH", "TRACE", "DELETE", "POST", "GET", "HEAD"):
        if method not in allowed:
            refused = get(path, address, method)
            if path == "/v1/sessions/x":  # Anthropic's of another kind, which are not here
                assert (refused.status_code, method != "DELETE") == (404, True)
                continue
            assert refused.status_code == 405
            assert refused.headers["allow"] == options.headers["allow"]
    if "GET" not in allowed:
        return
    for asked in (address, address_of(CLOSED, **READY)):
        whole, head = get(path, asked), get(path, asked, "HEAD")
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert {**head.headers, "x": ""} == {**whole.headers, "x": ""}
        assert (whole.headers.get("www-authenticate") == "Bearer") == (whole.status_code == 401)


def test_the_head_of_a_stream_ends_it(demo_model_path: Path) -> None:
    """That of the events would go on for good: on a real server, its connection is free for the next request."""
    with scripted(demo_model_path) as (url, _), httpx.Client(base_url=url) as client:
        for path, kind in (("/v1/models", "application/json"), ("/nothing", "application/json"), ("/", "text/html")):
            head = client.head(path)
            assert head.headers["content-type"].startswith(kind) and not head.content
            assert int(head.headers["content-length"]) == len(client.get(path).content)


def test_pages_of_configured_origins_are_let_in() -> None:
    """Their preflight is answered, and they read answers and errors; nobody else does, by default no page."""
    ours, evil = "https://chat.example", "https://evil.example"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for origins, origin, let_in in (
        ([], ours, False), ([ours], ours, True), ([f"{ours.upper()}/"], ours, True), ([ours], evil, False),
        (["*"], evil, True), ([ours], f"{ours}.evil.example", False),
    ):  # fmt: skip
        address = address_of(AppConfig(allowed_origins=origins))
        preflight = get("/v1/chat/completions", address, "OPTIONS", {"origin": origin, **asks})
        refused = get("/v1/chat/completions", address, "GET", {"origin": origin})
        for answer in (preflight, refused):
            assert (answer.headers.get("access-control-allow-origin") in (origin, "*")) == let_in
            assert "access-control-allow-credentials" not in answer.headers
        if let_in:
            assert preflight.status_code == 200 and "POST" in preflight.headers["access-control-allow-methods"]
            assert "authorization" in preflight.headers["access-control-allow-headers"]
    for wrong in ("chat.example", "https://chat.example/page", ""):
        with pytest.raises(ValueError, match="must be the origin of a page"):
            AppConfig(allowed_origins=[wrong])


def test_the_version_is_told_to_everybody() -> None:
    assert get("/version", CLOSED).json() == {"version": __version__}


def test_usage_is_a_tenants_own_and_the_operators_to_see_whole() -> None:
    asked: list[tuple[str, str, str | None]] = []

    async def everywhere(first_day: str, last_day: str, tenant: str | None) -> UsageRows:
        asked.append((first_day, last_day, tenant))
        return [(UsageKey(last_day, tenant or "all", "demo", ""), Counts(requests=1))]

    address = address_of(CLOSED, usage=SimpleNamespace(everywhere=everywhere))
    week = "/v1/usage?start_date=2027-01-25&end_date=2027-01-31"
    assert get(week, address, key=KEY).json()["data"][0]["tenant"] == "acme"
    assert "2027-01-31,all,demo" in get(week + "&format=csv", address, key=OPERATOR).text
    assert asked == [("2027-01-25", "2027-01-31", "acme"), ("2027-01-25", "2027-01-31", None)]
    for wrong in ("?format=xml", "?start_date=yesterday"):
        assert get(f"/v1/usage{wrong}", address, key=KEY).status_code == 400


def test_a_tenant_sees_the_models_that_it_may_use_and_an_operator_all() -> None:
    """Another model is a 404 like an unknown one, and the base is not named as an adapter's parent either."""
    pirate = AdapterEntry("pirate", AdapterSpec("pirate", "0", "/lora/pirate"))
    for key, names, seen in (
        (OPERATOR, None, ["demo", "pirate"]),
        (KEY, None, ["demo", "pirate"]),
        (KEY, ["demo"], ["demo"]),
        (KEY, ["pirate"], ["pirate"]),
    ):
        tenant = ACME.model_copy(update={"models": names})
        address = address_of(CLOSED.model_copy(update={"tenants": [tenant]}), [pirate])
        listed, missing = (get(path, address, key=key) for path in ("/v1/models", "/v1/models/none"))
        assert [model["id"] for model in listed.json()["data"]] == seen
        assert ("/lora/" in listed.text) == (key == OPERATOR)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        for name in ("demo", "pirate"):
            one = get(f"/v1/models/{name}", address, key=key)
            if name in seen:
                assert one.json()["id"] == name
            else:
                assert (one.status_code, one.text) == (404, missing.text.replace("none", name))
                assert name not in listed.text


def test_public_metrics_name_tenants_to_operators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone else, tenants too, sees sums; without ``metrics_public`` nothing at all. (docs: tenants)"""
    public = CLOSED.model_copy(update={"metrics_public": True})

    async def all_samples(_: Address) -> list[Sample]:
        return [("warmpath_tenant_prompt_tokens_total", (("ingress", "i"), ("tenant", "acme")), 3.0)]

    monkeypatch.setattr(documents, "all_samples", all_samples)
    summed, named = b'total{ingress="i"} 3.0\n', b'total{ingress="i",tenant="acme"} 3.0\n'
    for config, key, status, shown in (
        (public, "", 200, summed),
        (public, KEY, 200, summed),
        (public, OPERATOR, 200, named),
        (CLOSED, OPERATOR, 200, named),
        (CLOSED, KEY, 403, b"operator key"),
        (CLOSED, "", 401, b""),
    ):
        answer = get("/metrics", config, key=key)
        assert answer.status_code == status
        assert shown in answer.content
        assert (b"acme" in answer.content) == (shown is named)


def test_vllms_names_are_served_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come beside ours. (docs: metrics)"""

    async def all_samples(_: Address) -> list[Sample]:
        return [("warmpath_num_requests_running", (("engine", "torch"), ("replica", "r")), 2.0)]

    monkeypatch.setattr(documents, "all_samples", all_samples)
    ours = b'warmpath_num_requests_running{engine="torch",replica="r"} 2.0'
    theirs = b'vllm:num_requests_running{engine="r",model_name="demo"} 2.0'
    for asked in (False, True):
        shown = get("/metrics", AppConfig(model="demo", vllm_metrics=asked)).content
        assert ours in shown
        assert (theirs in shown) == (b"vllm:" in shown) == asked


def test_health_is_for_good_and_tells_operators_of_a_refused_user_config() -> None:
    """It stays green, because the earlier settings apply. Only operators see the refusal. (docs: cluster)"""
    core = SimpleNamespace(knows_every_cache=True, replica_ids=["a", "b"], other_versions={}, stats=dict)
    address = address_of(CLOSED, core=core, connecting=SimpleNamespace(done=bool))
    for done, knows, status in ((False, True, 503), (True, False, 503), (True, True, 200), (True, False, 200)):
        address.first.connecting, core.knows_every_cache = SimpleNamespace(done=lambda done=done: done), knows  # type: ignore[assignment]
        assert get("/health", address).status_code == status, "later replicas do not change the health"
        assert {get("/ping", address, method).status_code for method in ("GET", "POST")} == {status}
    well = {"status": "ok", "replicas": 2}
    for why in ("", "policy must be one of lmetric"):
        address.refused_settings = why
        assert get("/health", address).json() == well
        told = get("/health", address, key=OPERATOR)
        assert (told.status_code, told.json()) == (200, well | {"refused_user_config": why} if why else well)


@pytest.mark.parametrize("config", [CLOSED, AppConfig(model="demo")], ids=["tenants", "open"])
def test_health_is_told_to_anybody_whatever_the_keys(config: AppConfig) -> None:
    """Two keys that differ are no operator's, even if one of them is; a probe behind a proxy may carry any."""
    core = SimpleNamespace(knows_every_cache=True, replica_ids=["a"], other_versions={}, stats=dict)
    address = address_of(config, core=core, connecting=SimpleNamespace(done=lambda: True))
    address.refused_settings = "policy must be one of lmetric"
    shown = get("/health", address)
    for authorization in (f"Bearer {OPERATOR}", "Bearer a", "Basic YTpi", "b"):
        for key in ("other", ""):
            headers = {"authorization": authorization, "x-api-key": key}
            for path in ("/health", "/ping", "/version", "/", "/openapi.json", "/docs"):
                alone = get(path, address)
                assert get(path, address, headers=headers).status_code == alone.status_code
            assert get("/health", address, headers=headers).json() == shown.json()


def test_an_error_of_a_route_without_a_guard_has_the_apis_shape() -> None:
    application = make_application(address_of(AppConfig()))

    async def unguarded(request: Request) -> Response:
        raise InvalidRequest("Send something else.")

    application.routes.insert(0, Route("/v1/messages/unguarded", Direct(unguarded)))
    refused = ask(application, "/v1/messages/unguarded")
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


def test_health_tells_operators_of_replicas_and_ingresses_with_other_messages() -> None:
    """During an upgrade they are not called; that alone is no ill health. (docs: upgrade)"""
    core = SimpleNamespace(knows_every_cache=True, replica_ids=["a"], other_versions={"old": 0}, stats=dict)
    broadcast = MagicMock(other_versions=lambda: {"front": 2})
    address = address_of(CLOSED, core=core, broadcast=broadcast, connecting=SimpleNamespace(done=lambda: True))
    assert get("/health", address).json() == {"status": "ok", "replicas": 1}
    told = get("/health", address, key=OPERATOR)
    assert (told.status_code, told.json()["other_versions"]) == (200, {"old": 0, "front": 2})


def test_health_tells_operators_of_loops_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in replicas, until they ran well for a while; clients see none of it. (docs: monitoring)"""
    loops = BackgroundLoops()
    for name in ("Feed.read", "Worker.run"):
        loops.begin(name)
    report = StatsReport(tuple(loops.samples()))
    core = SimpleNamespace(
        knows_every_cache=True, replica_ids=["a"], other_versions={}, stats=lambda: {"a": report, "b": late}
    )
    monkeypatch.setattr("serve_app.ingress.documents.LOOPS", BackgroundLoops())
    late = report
    address = address_of(CLOSED, core=core, connecting=SimpleNamespace(done=lambda: True))
    assert "failing" not in get("/health", address, key=OPERATOR).json()
    loops.failed("Feed.read", "KeyError")
    late = StatsReport(tuple(loops.samples()))
    told = get("/health", address, key=OPERATOR)
    assert (told.status_code, told.json()["failing"]) == (200, {"b: Feed.read": "see the replica's log"})
    assert "failing" not in get("/health", address).json()
    monkeypatch.setattr("serve_app.ingress.documents.LOOPS", loops)
    assert get("/health", address, key=OPERATOR).json()["failing"]["Feed.read"] == "KeyError"
