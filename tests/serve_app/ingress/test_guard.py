"""A request is authenticated once, and counted under the tenant that was found."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.openai.response import openai_error, openai_limits
from serve_app.config.tenants import TenantConfig
from serve_app.errors import InvalidRequest
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.tenants.tenants import Tenant, Tenants, make_api_key

KEY, DIGEST = make_api_key()


class CountingTenants(Tenants):
    """Real tenants that count how often they are asked."""

    asked = 0

    def authenticate(self, authorization: str | None) -> Tenant:
        self.asked += 1
        return super().authenticate(authorization)


@pytest.mark.parametrize(
    ("header", "has_tenants", "status", "counted"),
    [
        (f"Bearer {KEY}", True, 200, "acme"),
        ("Bearer guess", True, 401, "none"),
        (None, True, 401, "none"),
        (None, False, 200, "default"),
    ],
    ids=["a key", "a wrong key", "no key", "no tenants"],
)
def test_a_request_is_authenticated_once(header: str | None, has_tenants: bool, status: int, counted: str) -> None:
    configs = [TenantConfig(name="acme", key_sha256=[DIGEST])] if has_tenants else []
    tenants = CountingTenants(configs, b"s" * 32)
    metrics = IngressMetrics()
    guard = RouteGuard(tenants, metrics, Drain())
    headers = [(b"authorization", header.encode())] if header else []
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers})

    async def work() -> Response:
        guard.tenant(request)
        guard.tenant(request)
        return Response()

    response = asyncio.run(guard.answer(request, "chat", openai_error, work))
    assert response.status_code == status
    assert tenants.asked == 1
    found: dict[str, Any] = {
        dict(labels)["tenant"]: value for name, labels, value in metrics.samples() if name == "warmpath_requests_total"
    }
    assert found == {counted: 1.0}


def test_answers_tell_a_tenant_what_is_left_of_its_own_limits() -> None:
    """Errors too; who has no limits, or no key, is told nothing, whatever others have. (docs/security.md)"""
    (zeta, zeta_digest), metrics = make_api_key(), IngressMetrics()
    configs = [
        TenantConfig.model_validate({"name": "acme", "key_sha256": [DIGEST], "requests_per_second": 5}),
        TenantConfig.model_validate({"name": "zeta", "key_sha256": [zeta_digest]}),
    ]
    guard = RouteGuard(Tenants(configs, b"s" * 32), metrics, Drain(), limits=TenantLimits(configs))

    def told(key: str, *, fails: bool) -> set[str]:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers})

        async def work() -> Response:
            guard.tenant(request)
            if fails:
                raise InvalidRequest("no")
            return Response()

        response = asyncio.run(guard.answer(request, "chat", openai_error, work, openai_limits))
        return {name for name in response.headers if name.startswith("x-ratelimit")}

    names = {f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")}
    for fails in (False, True):
        assert told(KEY, fails=fails) == names
        assert told(zeta, fails=fails) == told("guess", fails=fails) == set()
