"""POST /v1/cache/explain: where a request would go now, and why, without sending it.

Owns the endpoint's own fields, ``tenant`` and ``policy``; the rest of the body is a chat or a completion as clients
send it. Knows nothing of authentication: whoever calls has checked that an operator asks.
"""

from __future__ import annotations

from typing import Any

from router.core import RoutingCore
from router.policy.policies import POLICIES
from serve_app.api.json_body import Body
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.errors import InvalidRequest
from serve_app.generation.dispatch import route_of
from serve_app.generation.prepare import Preparer
from serve_app.tenants.tenants import Tenant, Tenants


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
        fields = Body.parse(body)
        policies = self._policies(fields)
        tenant = self._tenant(fields)
        chat, completion = fields.raw("messages") is not None, fields.raw("prompt") is not None
        if chat == completion:
            raise InvalidRequest("Send the body of a chat (with messages) or of a completion (with prompt).")
        wanted = parse_chat(body) if chat else parse_completion(body)
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

    def _policies(self, fields: Body) -> list[str]:
        """Return the policies to explain, the one that orders the replicas first: by default the acting one."""
        chosen = fields.text("policy", 64)
        if chosen is None:
            acting = self._core.settings.policy
            return [acting, *(policy for policy in POLICIES if policy != acting)]
        if chosen not in POLICIES:
            raise fields.fault("policy", f"one of {', '.join(POLICIES)}")
        return [chosen]

    def _tenant(self, fields: Body) -> Tenant:
        names = self._tenants.names
        name = fields.text("tenant", 64)
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            raise fields.fault("tenant", f"the tenant on whose behalf to ask, one of {', '.join(names)[:1000]}")
        return self._tenants.named(name)
