"""vLLM's routes for a prompt's tokens, and for an ingress' load."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.openai.tokens import (
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
    parse_tokenize,
    tokens_body,
)
from serve_app.api.request import GenerateRequest
from serve_app.ingress.entrance import text_of, tokens
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.handler import Front, guarded, takes, warnings

router = APIRouter(tags=["tokens"])

INLINE_TOKENS = 4096
"""More tokens are listed outside the event loop."""


@router.post("/tokenize", **takes(TokenizeBody, TokenizeChatBody))
@guarded("tokenize")
async def tokenize(request: Request, address: Front) -> Response:
    """The tokens of a text, or of a chat's prompt (vLLM's path)."""
    names = False

    def parse(body: bytes) -> GenerateRequest:
        nonlocal names
        asked = parse_tokenize(body, address.of_query(request).name)
        names = asked.names
        return asked.request

    tenant, workers = address.guard.tenant(request), address.workers
    ids, wanted, model = await tokens(address, request, tenant, parse)

    def answer() -> Response:
        told = ids.tolist()
        shown = tokens_body(
            told, model.preparer.limits.max_model_len, model.tokenizer.names_of(told) if names else None
        )
        return json_response(shown, headers=warnings(wanted))

    return answer() if len(ids) <= INLINE_TOKENS else await workers.run(tenant.name, len(ids), answer)


@router.post("/detokenize", **takes(DetokenizeBody))
@guarded("detokenize")
async def detokenize(request: Request, address: Front) -> Response:
    """The text of tokens, special ones included (vLLM's path)."""
    return json_response({"prompt": await text_of(address, request, address.guard.tenant(request))})
