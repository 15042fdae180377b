"""OpenAI's generation endpoints."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.openai.request import ChatBody, CompletionBody, parse_chat, parse_completion
from serve_app.api.openai.response import ChatFormat, CompletionFormat
from serve_app.api.openai.responses.request import ResponsesBody, parse_response_request
from serve_app.api.openai.responses.response import ResponsesFormat
from serve_app.ingress.routes.handler import Front, guarded, takes

router = APIRouter(tags=["generation"])

CHAT, COMPLETION, RESPONSES = ChatFormat(), CompletionFormat(), ResponsesFormat()


@router.post("/v1/chat/completions", **takes(ChatBody))
@guarded("chat", CHAT.error)
async def chat_completions(request: Request, services: Front) -> Response:
    """OpenAI's chat completions."""
    return await services.generate(request, parse_chat, CHAT)


@router.post("/v1/completions", **takes(CompletionBody))
@guarded("completions", COMPLETION.error)
async def completions(request: Request, services: Front) -> Response:
    """OpenAI's (legacy) completions."""
    return await services.generate(request, parse_completion, COMPLETION)


@router.post("/v1/responses", **takes(ResponsesBody))
@guarded("responses", RESPONSES.error)
async def responses(request: Request, services: Front) -> Response:
    """OpenAI's responses; nothing is stored."""
    return await services.generate(request, parse_response_request, RESPONSES)
