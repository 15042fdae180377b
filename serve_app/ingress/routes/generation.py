"""The routes of OpenAI's and Anthropic's APIs: generation, token counts and models."""

import functools

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.anthropic.request import CountTokensBody, MessagesBody, parse_count, parse_messages
from serve_app.api.anthropic.response import MessagesFormat, anthropic_model, anthropic_models
from serve_app.api.openai.request import ChatBody, CompletionBody, parse_chat, parse_completion
from serve_app.api.openai.response import CHAT, COMPLETION, models_body
from serve_app.errors import ModelNotFound
from serve_app.ingress.address import Address
from serve_app.ingress.entrance import generate, tokens
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.handler import ANTHROPIC, guarded, speaks_anthropic, takes, warnings

router = APIRouter()

MESSAGES_PATH = "/v1/messages"


@router.post("/v1/chat/completions", tags=["generation"], **takes(ChatBody))
@guarded("chat")
async def chat_completions(request: Request, address: Address) -> Response:
    """OpenAI's chat completions."""
    tenant = address.guard.tenant(request)
    parse = functools.partial(parse_chat, model=address.default_model(request, tenant))
    return await generate(address, request, tenant, parse, CHAT)


@router.post("/v1/completions", tags=["generation"], **takes(CompletionBody))
@guarded("completions")
async def completions(request: Request, address: Address) -> Response:
    """OpenAI's (legacy) completions."""
    tenant = address.guard.tenant(request)
    parse = functools.partial(parse_completion, model=address.default_model(request, tenant))
    return await generate(address, request, tenant, parse, COMPLETION)


@router.post(MESSAGES_PATH, tags=["messages"], **takes(MessagesBody))
@guarded("messages", ANTHROPIC)
async def messages(request: Request, address: Address) -> Response:
    """Anthropic's messages."""
    tenant = address.guard.tenant(request)
    shown = MessagesFormat(functools.partial(address.history.compare, tenant.name))
    parse = functools.partial(parse_messages, follow_rules=address.config.agent_prompt_rules)
    return await generate(address, request, tenant, parse, shown)


@router.post(f"{MESSAGES_PATH}/count_tokens", tags=["messages"], **takes(CountTokensBody))
@guarded("count_tokens", ANTHROPIC)
async def count_tokens(request: Request, address: Address) -> Response:
    """Count the tokens of a message's prompt, without generating."""
    parse = functools.partial(parse_count, follow_rules=address.config.agent_prompt_rules)
    ids, wanted, _ = await tokens(address, request, address.guard.tenant(request), parse)
    return json_response({"input_tokens": len(ids)}, headers=warnings(wanted))


@router.get("/v1/models", tags=["models"])
@guarded("models", None)
async def models(request: Request, address: Address) -> Response:
    """The served model and the LoRA adapters that the caller may use."""
    shown = anthropic_models if speaks_anthropic(request) else models_body
    return json_response(shown(address.cards(request)))


@router.get("/v1/models/{model:path}", tags=["models"])
@guarded("models", None)
async def model(request: Request, address: Address, model: str) -> Response:
    """One model by name, of those that ``/v1/models`` lists for the caller."""
    for served in address.cards(request):
        if served["id"] == model:
            return json_response(anthropic_model(served) if speaks_anthropic(request) else served)
    raise ModelNotFound(f"The model {model[:200]!r} is not served here; GET /v1/models lists all.", param="model")
