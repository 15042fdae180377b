"""POST /v1/cache/explain: where a request would go now, and why, without sending it.

Owns the endpoint's own fields, ``tenant`` and ``policy``; the rest of the body is a chat, a completion or a
response as clients send it. Whoever calls has checked that an operator asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from router.core import RoutingCore
from router.policy.policies import POLICIES
from serve_app.api.json_body import JsonBody, Text64
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import GenerateRequest
from serve_app.errors import InvalidRequest
from serve_app.generation.dispatch import route_of
from serve_app.generation.prepare import Preparer
from serve_app.tenants.tenants import Tenant, Tenants


class ExplainBody(JsonBody):
    """The body of ``POST /v1/cache/explain``: a chat's, a completion's or a response's fields, and these."""

    tenant: Text64 = Field(None, description="on whose behalf; needed where there are several")
    policy: Text64 = Field(None, description="default: all policies, the acting one first")
    messages: Any = Field(None, description="a chat's messages, or:")
    prompt: Any = Field(None, description="a completion's prompt, or:")
    input: Any = Field(None, description="a response's input")


_PARSERS: dict[str, Callable[[bytes], GenerateRequest]] = {
    "messages": parse_chat,
    "prompt": parse_completion,
    "input": parse_response_request,
}
"""By the field that no other body has."""


class Explainer:
    """Explains requests by the state of one ingress' router."""

    def __init__(self, core: RoutingCore, preparer: Preparer, tenants: Tenants) -> None:
        self._core = core
        self._preparer = preparer
        self._tenants = tenants

    async def explain(self, body: bytes) -> dict[str, Any]:
        """Return the document for a request's body; each prompt is explained as if it came alone.

        Raises InvalidRequest, and what the request itself would be refused with.
        """
        asked = ExplainBody.parse(body)
        policies = self._policies(asked.policy)
        tenant = self._tenant(asked.tenant)
        parsers = [parse for field, parse in _PARSERS.items() if getattr(asked, field) is not None]
        if len(parsers) != 1:
            raise InvalidRequest(
                "Send the body of a chat (with messages), of a completion (with prompt) or of a response (with input)."
            )
        wanted = parsers[0](body)
        generations = await self._preparer.prepare(wanted, tenant, "explain")
        return {
            "object": "cache.explanation",
            "model": wanted.answering_model,
            "tenant": tenant.name,
            "router_id": self._core.router_id,
            "policy": self._core.settings.policy,
            "prompts": [
                {"prefix": generation.placement_key.hex(), **self._core.explain(route_of(generation), policies)}
                for generation in generations[:: wanted.n]
            ],
        }

    def _policies(self, chosen: str | None) -> list[str]:
        """Return the policies to explain, the one that orders the replicas first: by default the acting one."""
        if chosen is None:
            acting = self._core.settings.policy
            return [acting, *(policy for policy in POLICIES if policy != acting)]
        if chosen not in POLICIES:
            raise InvalidRequest(f"policy must be one of {', '.join(POLICIES)}.", param="policy")
        return [chosen]

    def _tenant(self, name: str | None) -> Tenant:
        tenants = self._tenants.by_name
        if name is None and len(tenants) == 1:
            return next(iter(tenants.values()))
        if name not in tenants:
            demand = f"the tenant on whose behalf to ask, one of {', '.join(tenants)[:1000]}"
            raise InvalidRequest(f"tenant must be {demand}.", param="tenant")
        return tenants[name]
