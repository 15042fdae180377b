"""vLLM's endpoints for LoRA adapters; an operator's."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.openai.response import openai_error
from serve_app.ingress.adapter_admin import LoadAdapterBody, UnloadAdapterBody
from serve_app.ingress.routes.handler import Front, guarded, takes

router = APIRouter(tags=["adapters"])


@router.post("/v1/load_lora_adapter", **takes(LoadAdapterBody))
@guarded("load_lora_adapter", openai_error)
async def load_lora_adapter(request: Request, services: Front) -> Response:
    """Load an adapter on every replica and offer it under its name."""
    services.guard.require_operator(request)
    return Response(await services.adapter_admin.load(await services.body(request)))


@router.post("/v1/unload_lora_adapter", **takes(UnloadAdapterBody))
@guarded("unload_lora_adapter", openai_error)
async def unload_lora_adapter(request: Request, services: Front) -> Response:
    """Offer an adapter no longer; requests that have begun finish with it."""
    services.guard.require_operator(request)
    return Response(await services.adapter_admin.unload(await services.body(request)))
