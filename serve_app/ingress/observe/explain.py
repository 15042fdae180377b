"""POST /v1/cache/explain: the replica that a request would go to now, and the reason, without sending it."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from router.core import RoutingCore
from router.policy.policies import POLICIES
from serve_app.api.json_body import JsonBody, Text64
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import GenerateRequest
from serve_app.errors import InvalidRequest
from serve_app.fairness.front_door import FrontDoor
from serve_app.generation.prepare import Preparer
from serve_app.tenants.tenants import Tenant, Tenants


class ExplainBody(JsonBody):
    """The body of ``POST /v1/cache/explain``: the fields of a chat, a completion or a response, and these."""

    tenant: Text64 = Field(None, description="the tenant of the request; needed if there are several")
    policy: Text64 = Field(None, description="default: all policies, the acting one first")
    messages: Any = Field(None, description="a chat's messages, or:")
    prompt: Any = Field(None, description="a completion's prompt, or:")
    input: Any = Field(None, description="a response's input")


_PARSERS: dict[str, Callable[[bytes], GenerateRequest]] = {
    "messages": parse_chat,
    "prompt": parse_completion,
    "input": parse_response_request,
}
"""The parser for each body's distinguishing field."""


async def explanation(
    body: bytes, core: RoutingCore, preparer: Preparer, tenants: Tenants, front_door: FrontDoor
) -> dict[str, Any]:
    """Return the document for a body; each prompt is explained alone. Raises the errors of the request itself."""
    asked = ExplainBody.parse(body)
    policies = _policies(asked.policy, core.settings.policy)
    tenant = _tenant(asked.tenant, tenants.by_name)
    parsers = [parse for field, parse in _PARSERS.items() if getattr(asked, field) is not None]
    if len(parsers) != 1:
        raise InvalidRequest(
            "Send the body of a chat (with messages), of a completion (with prompt) or of a response (with input)."
        )
    wanted = parsers[0](body)
    generations = await preparer.prepare(wanted, tenant, "explain")
    return {
        "object": "cache.explanation",
        "model": wanted.answering_model,
        "tenant": tenant.name,
        "router_id": core.router_id,
        "policy": core.settings.policy,
        **front_door.outlook(tenant.name),
        "prompts": [
            {"prefix": generation.placement_key.hex(), **core.explain(generation, policies)}
            for generation in generations[:: wanted.n]
        ],
    }


def _policies(chosen: str | None, acting: str) -> list[str]:
    """Return the policies to explain. The first one orders the replicas; by default it is the acting policy."""
    if chosen is None:
        return [acting, *(policy for policy in POLICIES if policy != acting)]
    if chosen not in POLICIES:
        raise InvalidRequest(f"policy must be one of {', '.join(POLICIES)}.", param="policy")
    return [chosen]


def _tenant(name: str | None, tenants: Mapping[str, Tenant]) -> Tenant:
    if name is None and len(tenants) == 1:
        return next(iter(tenants.values()))
    if name is None or name not in tenants:
        demand = f"the tenant of the request, one of {', '.join(tenants)[:1000]}"
        raise InvalidRequest(f"tenant must be {demand}.", param="tenant")
    return tenants[name]
