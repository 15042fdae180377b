"""Registered prompts: what there is and how it is used, and cut-over from version to version; an operator's."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.openai.response import openai_error
from serve_app.ingress.http import json_response
from serve_app.ingress.prompts.admin import PromptBody
from serve_app.ingress.routes.handler import Front, guarded, takes

router = APIRouter(tags=["prompts"])


@router.get("/v1/prompts")
@guarded("prompts", openai_error)
async def prompts(request: Request, services: Front) -> Response:
    """Every prompt, what its name means, and the hit rate and times of each version; ``?name=`` for one."""
    services.guard.require_operator(request)
    return json_response(await services.prompt_admin.status(request.query_params.get("name")))


@router.post("/v1/prompts/warm", **takes(PromptBody))
@guarded("prompts_warm", openai_error)
async def warm(request: Request, services: Front) -> Response:
    """Compute a version on the replicas that will serve it."""
    services.guard.require_operator(request)
    return json_response(await services.prompt_admin.warm(await services.body(request)))


@router.post("/v1/prompts/promote", **takes(PromptBody))
@guarded("prompts_promote", openai_error)
async def promote(request: Request, services: Front) -> Response:
    """Warm a version, then let the name mean it."""
    services.guard.require_operator(request)
    return json_response(await services.prompt_admin.promote(await services.body(request)))


@router.post("/v1/prompts/rollback", **takes(PromptBody))
@guarded("prompts_rollback", openai_error)
async def rollback(request: Request, services: Front) -> Response:
    """Go back to the version before."""
    services.guard.require_operator(request)
    return json_response(await services.prompt_admin.roll_back(await services.body(request)))
