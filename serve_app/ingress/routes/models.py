"""Which models there are, in the shape of the API whose headers a request has."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.anthropic.response import anthropic_model, anthropic_models
from serve_app.api.openai.response import models_body, openai_error
from serve_app.errors import ModelNotFound
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.anthropic import anthropic_guarded, speaks_anthropic
from serve_app.ingress.routes.handler import Front, guarded
from serve_app.ingress.services import Services

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def models(request: Request, services: Front) -> Response:
    """The served model and the LoRA adapters that the caller may use."""
    return await (_anthropic_models if speaks_anthropic(request) else _models)(request, services)


@router.get("/v1/models/{model:path}")
async def model(request: Request, services: Front, model: str) -> Response:
    """One model by name, of those that ``/v1/models`` lists for the caller."""
    return await (_anthropic_model if speaks_anthropic(request) else _model)(request, services, model=model)


@guarded("models", openai_error)
async def _models(request: Request, services: Services) -> Response:
    return json_response(models_body(services.models(request)))


@anthropic_guarded("models")
async def _anthropic_models(request: Request, services: Services) -> Response:
    return json_response(anthropic_models(services.models(request)))


@guarded("models", openai_error)
async def _model(request: Request, services: Services, model: str) -> Response:
    return json_response(_served(request, services, model))


@anthropic_guarded("models")
async def _anthropic_model(request: Request, services: Services, model: str) -> Response:
    return json_response(anthropic_model(_served(request, services, model)))


def _served(request: Request, services: Services, model: str) -> dict[str, Any]:
    for served in services.models(request):
        if served["id"] == model:
            return served
    raise ModelNotFound(f"The model {model[:200]!r} is not served here; GET /v1/models lists what is.", param="model")
