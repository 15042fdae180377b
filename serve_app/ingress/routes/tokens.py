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
from serve_app.ingress.address import Address
from serve_app.ingress.entrance import text_of, tokens
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.handler import guarded, takes, warnings

router = APIRouter(tags=["tokens"])

INLINE_TOKENS = 4096
"""More tokens are listed outside the event loop."""


@router.post("/tokenize", **takes(TokenizeBody, TokenizeChatBody))
@guarded("tokenize")
async def tokenize(request: Request, address: Address) -> Response:
    """The tokens of a text, or of a chat's prompt (vLLM's path)."""
    tenant, workers, with_names = address.guard.tenant(request), address.workers, False
    default = address.default_model(request, tenant)

    def parse(body: bytes) -> GenerateRequest:
        nonlocal with_names
        parsed = parse_tokenize(body, default)
        with_names = parsed.names
        return parsed.request

    token_ids, generate_request, model = await tokens(address, request, tenant, parse)

    def answer() -> Response:
        ids = token_ids.tolist()
        names = model.tokenizer.names_of(ids) if with_names else None
        body = tokens_body(ids, model.preparer.limits.max_model_len, names)
        return json_response(body, headers=warnings(generate_request))

    return answer() if len(token_ids) <= INLINE_TOKENS else await workers.run(tenant.name, len(token_ids), answer)


@router.post("/detokenize", **takes(DetokenizeBody))
@guarded("detokenize")
async def detokenize(request: Request, address: Address) -> Response:
    """The text of tokens, special ones included (vLLM's path)."""
    return json_response({"prompt": await text_of(address, request, address.guard.tenant(request))})
