"""A request is authenticated once, counted under the tenant found, and no other site's page may post or read."""

import asyncio
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.anthropic.response import anthropic_error
from serve_app.api.format import RenderError
from serve_app.api.openai.response import openai_error
from serve_app.config.tenants import TenantConfig
from serve_app.errors import (
    AuthenticationFailed,
    InvalidRequest,
    LimitReason,
    Overloaded,
    PermissionDenied,
    RateLimited,
    UnsupportedMediaType,
    WarmpathError,
)
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard, foreign_host, refuse_foreign_page
from serve_app.ingress.observe.answer_meter import Observers
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.routes.handler import OPENAI
from serve_app.live.tally import figure_of
from serve_app.tenants import Tenants, make_api_key

(KEY, DIGEST), (ZETA, ZETA_DIGEST) = make_api_key(), make_api_key()
ACME = TenantConfig.model_validate({"name": "acme", "key_sha256": [DIGEST], "requests_per_second": 5})
EVIL = "http://evil.example"
OURS = "127.0.0.1:8000"
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


def post(method: str = "POST", **headers: str | None) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items() if value is not None]
    return Request({"type": "http", "method": method, "path": "/", "headers": raw})


def answered(
    guard: RouteGuard, request: Request, *, fails: bool | WarmpathError = False, endpoint: str = "chat"
) -> Response:
    """Return the answer of a route that looks up the tenant twice, and then fails or not."""

    async def work() -> Response:
        guard.tenant(request)
        guard.tenant(request)
        if fails:
            raise fails if isinstance(fails, WarmpathError) else InvalidRequest("no")
        return Response()

    return asyncio.run(guard.answer(request, endpoint, OPENAI, work))


@pytest.mark.parametrize(
    ("header", "configs", "status", "counted"),
    [
        (f"Bearer {KEY}", [ACME], 200, "acme"),
        ("Bearer guess", [ACME], 401, "none"),
        (None, [ACME], 401, "none"),
        (None, [], 200, "default"),
    ],
    ids=["a key", "a wrong key", "no key", "no tenants"],
)
def test_a_request_is_authenticated_once(
    header: str | None, configs: list[TenantConfig], status: int, counted: str
) -> None:
    tenants, metrics = Tenants(configs, b"s" * 32), IngressMetrics()
    guard = RouteGuard(tenants, metrics, Drain())
    with patch.object(tenants, "authenticate", wraps=tenants.authenticate) as authenticate:
        assert answered(guard, post(authorization=header)).status_code == status
    assert authenticate.call_count == 1
    found = {dict(labels)["tenant"]: value for name, labels, value in metrics.samples() if "requests_total" in name}
    assert found.keys() == {counted}
    assert sum(value for name, _, value in metrics.samples() if name == "warmpath_requests_total") == 1.0


@pytest.mark.parametrize("key", [None, KEY, ZETA, "guess"], ids=["no key", "tenant", "operator", "guess"])
@pytest.mark.parametrize("operators", [[], [ZETA_DIGEST]], ids=["without operator", "with operator"])
@pytest.mark.parametrize("configs", [[], [ACME]], ids=["open", "tenants"])
def test_who_sees_what(key: str | None, operators: list[str], configs: list[TenantConfig]) -> None:
    """Everybody sees all only where nobody has a key; an operator always does, and a tenant its own part."""
    guard = RouteGuard(Tenants(configs, b"s" * 32, operator_key_sha256=operators), IngressMetrics(), Drain())
    asked = post(authorization=None if key is None else f"Bearer {key}")
    operator = bool(operators) and key == ZETA
    sees_all = operator or not (configs or operators)
    tenant = None if sees_all else "default" if not configs else "acme" if key == KEY else "nobody"

    def refused(work: Callable[[], object]) -> type[WarmpathError] | None:
        try:
            work()
        except WarmpathError as error:
            return type(error)
        return None

    assert guard.sees_all(asked) == sees_all
    if tenant == "nobody":
        assert refused(lambda: guard.viewer(asked)) is AuthenticationFailed
    else:
        assert guard.viewer(asked) == tenant
    unknown = tenant == "nobody" or (not configs and key is None)
    expected = None if sees_all else AuthenticationFailed if unknown else PermissionDenied
    assert refused(lambda: guard.require_operator(asked)) is expected


def test_errors_of_answers_are_in_the_figures_of_their_tenant() -> None:
    """Only errors that are the server's own count; requests on other routes do not."""
    metrics = IngressMetrics()
    guard = RouteGuard(Tenants([ACME], b"s" * 32), metrics, Drain())
    for error, endpoint in (
        (RateLimited("later", retry_after_s=1.0), "chat"),
        (Overloaded("later", retry_after_s=1.0), "messages"),
        (InvalidRequest("no"), "chat"),
        (RateLimited("later", retry_after_s=1.0), "cache_events"),
    ):
        answered(guard, post(authorization=f"Bearer {KEY}"), fails=error, endpoint=endpoint)
    for name in (None, "acme"):
        (bucket,) = metrics.rings[name].values()
        assert bucket == {"refused": 1, "failed": 1}


REASON = LimitReason("ingress", "concurrent_requests", 3, 3)


@pytest.mark.parametrize("render", [openai_error, anthropic_error])
def test_a_refusal_has_one_reason_everywhere(render: RenderError) -> None:
    """It is the same in each API's error, the counter and the figures of the page; other errors have none."""
    metrics = IngressMetrics()
    guard = RouteGuard(Tenants([ACME], b"s" * 32), metrics, Drain(), observers=Observers(refused=[metrics.refused]))
    told = {"place": "ingress", "limit": "concurrent_requests", "used": 3, "most": 3, "retry_after_s": 1.5}
    for error in (RateLimited("later", retry_after_s=1.5, reason=REASON), InvalidRequest("no")):
        assert render(error, "id").body["error"].get("reason") == (told if error.reason is REASON else None)
        answered(guard, post(authorization=f"Bearer {KEY}"), fails=error, endpoint="chat")
    counted = {labels: n for name, labels, n in metrics.samples() if name == "warmpath_refusals_total"}
    assert counted == {(("limit", "concurrent_requests"), ("place", "ingress"), ("tenant", "acme")): 1.0}
    (bucket,) = metrics.rings["acme"].values()
    assert figure_of(bucket, 0)["refused_by"] == {"ingress: concurrent_requests": 1}


def test_answers_tell_a_tenant_its_own_remaining_limits() -> None:
    """Errors do too; a client without limits, or without a key, sees none, even if others have some. docs: isolation"""
    configs = [ACME, TenantConfig(name="zeta", key_sha256=[ZETA_DIGEST])]
    guard = RouteGuard(Tenants(configs, b"s" * 32), IngressMetrics(), Drain(), TenantLimits(configs))

    def told(key: str, *, fails: bool) -> set[str]:
        response = answered(guard, post(authorization=f"Bearer {key}"), fails=fails)
        return {name for name in response.headers if name.startswith("x-ratelimit")}

    names = {f"x-ratelimit-{kind}-requests" for kind in ("limit", "remaining", "reset")}
    for fails in (False, True):
        assert told(KEY, fails=fails) == names
        assert told(ZETA, fails=fails) == told("guess", fails=fails) == set()


@pytest.mark.parametrize(
    ("origin", "content_type", "refused"),
    [
        # Forms, and fetch without a preflight; also of a page without an origin (a file, a sandboxed frame).
        *((origin, kind, UnsupportedMediaType)
          for origin in (EVIL, "null", "http://127.0.0.1:3000")
          for kind in (None, FORM, "text/plain", "multipart/form-data; boundary=x")),
        # Without an Origin there is no page: curl -d and urllib declare their JSON as a form.
        *((None, kind, None) for kind in (None, FORM, JSON)),
        # Our own /docs; JSON that a proxy in front has allowed by CORS.
        (f"http://{OURS}", None, None), (EVIL, f"{JSON}; charset=utf-8", None),
    ],
)  # fmt: skip
def test_pages_post_only_where_they_were_let_in(
    origin: str | None, content_type: str | None, refused: type[WarmpathError] | None
) -> None:
    """Safe methods are never refused; a browser asks before any DELETE."""

    def verdict(method: str) -> type[WarmpathError] | None:
        try:
            refuse_foreign_page(post(method, host=OURS, origin=origin, content_type=content_type))
        except WarmpathError as error:
            return type(error)
        return None

    assert verdict("POST") is refused
    assert {verdict(method) for method in ("GET", "HEAD", "DELETE", "OPTIONS")} == {None}


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("origin", [None, EVIL])
def test_no_method_answers_for_another_host(method: str, origin: str | None) -> None:
    """DNS rebinding: to the browser the page and the server are one site, so a GET has no Origin, and JSON is no proof.

    No page has an address, localhost or a name in .internal; others are configured. None: any name is this server's.
    """

    def known(host: str | None, allowed: list[str] | None) -> bool:
        return foreign_host(post(method, host=host, origin=origin), allowed) is None

    ours = (OURS, "localhost:8000", "localhost.", "app.localhost", "[::1]:8000", "192.168.1.7", "Chat.example",
            "host.docker.internal:8000")  # fmt: skip
    foreign = ("evil.example:8000", "evil.example", "localhost.evil.example", "internal", "", "[::1",
               "chat.example.evil", "127.0.0.1.evil.example", "localhost@evil.example")  # fmt: skip
    assert [host for host in ours if not known(host, ["chat.example"])] == []
    assert [host for host in foreign if known(host, ["chat.example"])] == []
    assert not known("chat.example", [])
    assert all(known(host, None) for host in (*ours, *foreign, None))
    assert known(None, []) is (origin is None), "a probe in HTTP/1.0 has no Host; a browser always sends one"


LABELS = st.sampled_from(["localhost", "internal", "evil", "chat", "example", "127", "0", "1", "255", "256", "01"])
NAMES = st.lists(LABELS, min_size=1, max_size=5).flatmap(
    lambda labels: st.lists(st.sampled_from([".", ".", "", "-"]), min_size=len(labels), max_size=len(labels)).map(
        lambda glue: "".join(label + joint for label, joint in zip(labels, glue, strict=True)).rstrip(".-")
    )
)
ADDRESSES = st.ip_addresses().map(lambda address: f"[{address}]" if address.version == 6 else str(address))


def is_ours(name: str) -> bool:
    """Return whether a name in lower case is this server's, label by label, where it is also chat.example."""
    labels = name.split(".")
    if name.startswith("[") or labels == ["chat", "example"]:
        return True
    if len(labels) == 4 and all(
        label.isdecimal() and str(int(label)) == label and int(label) < 256 for label in labels
    ):
        return True
    return labels[-1] == "localhost" or (labels[-1] == "internal" and len(labels) > 1)


@given(name=NAMES | ADDRESSES, port=st.sampled_from(["", ":", ":80", ":8000"]), dot=st.booleans(), upper=st.booleans())
@example(name="evillocalhost", port="", dot=False, upper=False)
@example(name="evil-localhost", port=":80", dot=True, upper=False)
@example(name="evilinternal", port="", dot=False, upper=True)
@example(name="evilchat.example", port="", dot=False, upper=False)
def test_a_host_is_its_name_however_it_is_written(name: str, port: str, dot: bool, upper: bool) -> None:
    """A port, the root's dot and upper case change nothing, in the header and in the setting; a longer name does."""
    written = name + "." * (dot and not name.startswith("[")) + port
    written = written.upper() if upper else written
    assert (foreign_host(post(host=written), ["Chat.Example.:443"]) is None) == is_ours(name)
    assert foreign_host(post(host=name), [written]) is None


AFTER = ("@.", "/.", "#.", "?.", ":.", ",.", "\\.", "%2e", "\t", ":80.", ":80@")


@given(
    name=st.sampled_from(["localhost", "127.0.0.1", "[::1]", "chat.example", "a.internal"]),
    before=st.sampled_from(["", "evil.example@", "localhost@", "evil.example/", "evil.example#", "[", " "]),
    after=st.sampled_from(["", *(f"{end}evil.example" for end in ("", "@", *AFTER)), ":80:80", ":x", "..", "]", " "]),
)
def test_what_is_no_host_is_nobodys(name: str, before: str, after: str) -> None:
    """Nothing before or behind a name of ours makes a host of it; parsers of URLs would find one there."""
    assume(before or after)
    assert foreign_host(post(host=before + name + after), ["chat.example"]) is not None


@pytest.mark.parametrize("origin", [EVIL, "null", "http://127.0.0.1:3000"])
def test_pages_that_are_let_in_post_anything(origin: str) -> None:
    """A file's upload is no JSON; others are still refused."""
    page = post(host=OURS, origin=origin, content_type="multipart/form-data; boundary=x")
    for allowed in ([origin], ["*"]):
        refuse_foreign_page(page, allowed)
    for allowed in ([], ["http://other.example"], [f"{origin}.example"]):
        with pytest.raises(UnsupportedMediaType):
            refuse_foreign_page(page, allowed)
