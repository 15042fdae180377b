"""Health, metrics and the caches: what an operator looks at and resets."""

from __future__ import annotations

from importlib import metadata

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.openai.response import openai_error
from serve_app.ingress.http import json_response
from serve_app.ingress.observe.explain import ExplainBody
from serve_app.ingress.observe.metrics import render, without_tenants
from serve_app.ingress.routes.handler import Front, guarded, takes

VERSION = metadata.version("warmpath-serve")

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health(request: Request, services: Front) -> Response:
    """200 once a request can be answered, and was routed knowing what every replica holds.

    Operators are told here, too, why a ``user_config`` is not in force.
    """
    ready, replicas = services.health.now()
    stopping = services.drain.begun
    status = "stopping" if stopping else "ok" if ready else "starting"
    body = {"status": status, "replicas": replicas}
    if services.refused_settings and services.guard.sees_all(request):
        body["refused_user_config"] = services.refused_settings
    return json_response(body, 200 if ready and not stopping else 503)


@router.get("/version")
async def version() -> Response:
    """The version of warmpath that answers (vLLM's path)."""
    return json_response({"version": VERSION})


@router.get("/metrics")
@guarded("metrics", openai_error)
async def metrics(request: Request, services: Front) -> Response:
    """The whole app's metrics as Prometheus text: every ingress, every replica."""
    if not services.config.metrics_public:
        services.guard.require_operator(request)
    samples = await services.all_samples()
    if not services.guard.sees_all(request):
        samples = without_tenants(samples)
    return Response(render(samples), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/cache/state")
@guarded("cache_state", openai_error)
async def cache_state(request: Request, services: Front) -> Response:
    """What the caches hold, as this ingress' router sees it."""
    services.guard.require_operator(request)
    return json_response(await services.cache_state())


@router.post("/v1/cache/explain", **takes(ExplainBody))
@guarded("cache_explain", openai_error)
async def explain(request: Request, services: Front) -> Response:
    """Where a request would go now, and why; nothing is sent, reserved or counted."""
    services.guard.require_operator(request)
    return json_response(await services.explainer.explain(await services.body(request)))


@router.post("/reset_prefix_cache")
@guarded("reset_prefix_cache", openai_error)
async def reset_prefix_cache(request: Request, services: Front) -> Response:
    """Forget every cached block that is not in use, on every replica (vLLM's path)."""
    services.guard.require_operator(request)
    complete = all(await services.broadcast.replicas("reset_prefix_cache", timeout_s=30))
    services.live.reset(complete=complete)
    return json_response({"complete": complete})
