"""Which models there are, in OpenAI's shape."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.openai.response import models_body, openai_error
from serve_app.errors import ModelNotFound
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.handler import Front, guarded

router = APIRouter(tags=["models"])


@router.get("/v1/models")
@guarded("models", openai_error)
async def models(request: Request, services: Front) -> Response:
    """The served model and the LoRA adapters that the caller may use."""
    return json_response(models_body(services.models(request)))


@router.get("/v1/models/{model:path}")
@guarded("models", openai_error)
async def model(request: Request, services: Front, model: str) -> Response:
    """One model by name, of those that ``/v1/models`` lists for the caller."""
    for one in services.models(request):
        if one["id"] == model:
            return json_response(one)
    raise ModelNotFound(f"The model {model[:200]!r} is not served here; GET /v1/models lists what is.", param="model")
