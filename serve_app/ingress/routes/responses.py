"""OpenAI's responses: new ones, and the stored ones of a tenant."""

import functools

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api import format as sse
from serve_app.api.openai.responses.items import item_page
from serve_app.api.openai.responses.request import ResponsesBody
from serve_app.api.openai.responses.response import ReplayQuery, complete, replayed
from serve_app.api.openai.tokens import InputTokensBody, parse_input_tokens
from serve_app.errors import NotFound
from serve_app.ingress.address import Address
from serve_app.ingress.conversation import Conversation
from serve_app.ingress.entrance import generate, tokens
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.handler import guarded, takes, warnings
from serve_app.stored.responses import Document

router = APIRouter()


@router.post("/v1/responses", tags=["generation"], **takes(ResponsesBody))
@guarded("responses")
async def responses(request: Request, address: Address) -> Response:
    """OpenAI's responses; stored by default, unless the request or the settings turn that off."""
    tenant = address.guard.tenant(request)
    read = functools.partial(ResponsesBody.parse, model=address.default_model(request, tenant))
    conversation = Conversation(address.stored, tenant.name, read)
    return await generate(address, request, tenant, conversation.parse, conversation)


@router.post("/v1/responses/input_tokens", tags=["generation"], **takes(InputTokensBody))
@guarded("input_tokens")
async def input_tokens(request: Request, address: Address) -> Response:
    """The number of tokens in a response's prompt, without generating."""
    tenant = address.guard.tenant(request)
    read = functools.partial(parse_input_tokens, model=address.default_model(request, tenant))
    conversation = Conversation(address.stored, tenant.name, read)
    ids, wanted, _ = await tokens(address, request, tenant, conversation.parse, conversation)
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)}, headers=warnings(wanted))


@router.get("/v1/responses/{response_id}", tags=["generation"])
@guarded("stored_responses")
async def stored_response(request: Request, address: Address, response_id: str) -> Response:
    """A stored response. Query: `stream` (true: as events, each text in one), `starting_after` (an event's number)."""
    asked = ReplayQuery.checked(dict(request.query_params))
    response = complete((await _found(request, address, response_id)).response)
    if asked.stream.lower() not in ("true", "1"):
        return json_response(response)
    return Response(replayed(response, asked.starting_after), headers={**sse.HEADERS, "content-type": sse.CONTENT_TYPE})


@router.get("/v1/responses/{response_id}/input_items", tags=["generation"])
@guarded("stored_responses")
async def input_items(request: Request, address: Address, response_id: str) -> Response:
    """The input items of a stored response, including its whole conversation; `after`, `limit`, `order`."""
    return json_response(item_page((await _found(request, address, response_id)).input, request.query_params))


@router.delete("/v1/responses/{response_id}", tags=["generation"])
@guarded("stored_responses")
async def delete_response(request: Request, address: Address, response_id: str) -> Response:
    """Delete a stored response; responses that continue it keep their conversations."""
    tenant = address.guard.tenant(request).name
    if address.stored is None or not await address.stored.delete(tenant, response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _found(request: Request, address: Address, response_id: str) -> Document:
    """Return a response of the caller's tenant. Raises NotFound."""
    tenant = address.guard.tenant(request).name
    found = await address.stored.get(tenant, response_id) if address.stored is not None else None
    if found is None:
        raise _not_found(response_id)
    return found[0]


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"There is no stored response {response_id[:64]!r}: it may be deleted or expired.")
