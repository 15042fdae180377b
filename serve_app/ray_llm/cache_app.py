"""A small application beside Ray's: the page, the event stream, routing explanations, and metrics.

A tenant's key gives access to its own part of the events; the rest needs ``WARMPATH_OPERATOR_KEY``.
"""

import asyncio
import hmac
import json
import os
import time
from types import SimpleNamespace
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from router.policies import POLICIES
from router.protocol.request import Decision, Reason
from router.serve.core_registry import router_for
from router.serve.request_router import deployment_key
from serve_app.errors import RateLimited
from serve_app.ingress.observe.metrics import render, replica_samples
from serve_app.ingress.routes.event_stream import LiveEventStream
from serve_app.ingress.routes.page import page_response
from serve_app.live.live import Live
from serve_app.live.prefixes import Answered, PrefixTable
from serve_app.live.view import encoded
from serve_app.logs import log_at_once
from serve_app.ray_compat import use_outside_of_replicas
from serve_app.ray_llm.router import WarmRouter
from serve_app.ray_llm.tenant_header import RepeatedTenant

OPERATOR_KEY = "WARMPATH_OPERATOR_KEY"
MAX_WATCHERS = 64
"""Any key may watch, and a client can invent any number of keys."""
SHOWN_TENANTS = 64
"""Number of tenants with kept prefixes; the last used ones stay."""


class CacheApp:
    """The application of one LLM application. Like every router, it knows the caches by following all feeds."""

    def __init__(self, application: str, deployment: str, route_prefix: str) -> None:
        """``deployment``: of the LLM server, as in ``serve status``; ``route_prefix``: of its application."""
        log_at_once()
        self._key = application, deployment
        self._llm = route_prefix.rstrip("/")
        self._operator = f"Bearer {os.environ[OPERATOR_KEY]}" if os.environ.get(OPERATOR_KEY) else ""
        self._handle: DeploymentHandle | None = None
        self._live: Live | None = None
        self._numbers: dict[str, int] = {}

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        try:
            return await self._answer(request)
        except HTTPException as error:
            return _refusal(error.status_code, error.detail)
        except RateLimited as error:
            return _refusal(429, str(error))

    async def _answer(self, request: Request) -> Response:
        path = request.url.path.removeprefix(request.scope.get("root_path", "")).strip("/")
        if not path and not request.url.path.endswith("/"):
            return RedirectResponse(f"{request.url.path}/")  # the page's requests are relative to it
        if not path or path.startswith("page/"):
            return page_response(path.removeprefix("page/") or "index.html", request.headers.get("if-none-match"))
        if path in ("v1/models", "v1/chat/completions"):
            return RedirectResponse(f"{self._llm}/{path}", 307)
        router = self._router()
        if router is None or not router.knows_every_cache:
            raise HTTPException(503, "this router has not heard from every replica yet; ask again")
        viewer = self._viewer(request, router)
        if path == "v1/cache/events":
            live = self._live = self._live or self._new_live(router)
            if request.query_params.get("once") == "true":
                return Response(encoded(await live.snapshot(viewer)).payload, media_type="application/json")
            if live.watchers >= MAX_WATCHERS:
                raise HTTPException(429, f"there are {MAX_WATCHERS} event streams already; close one first")
            return LiveEventStream(live, viewer, await live.watch(viewer), lambda: True)
        if viewer is not None:
            raise HTTPException(403, f"this needs the operator's key: set {OPERATOR_KEY} for this application, send it")
        if path == "v1/cache/state":
            return JSONResponse(router.core.state())
        if path == "metrics":
            return Response(render(replica_samples(router.core)), media_type="text/plain; version=0.0.4")
        if path == "v1/cache/explain" and request.method == "POST":
            return JSONResponse(await self._explained(await request.body(), router))
        raise HTTPException(404, "there are /, v1/cache/events, v1/cache/state, v1/cache/explain (POST) and metrics")

    async def _explained(self, body: bytes, router: WarmRouter) -> dict[str, Any]:
        try:
            query = SimpleNamespace(**json.loads(body))
        except (ValueError, TypeError) as error:
            raise HTTPException(400, "send the body of a chat or a completion as JSON") from error
        acting = router.core.settings.policy
        explanation = router.explain_soon(query, str(getattr(query, "tenant", "")), sorted(POLICIES, key=acting.__ne__))
        return {"policy": acting, "prompts": [await asyncio.wrap_future(explanation)]}

    def _viewer(self, request: Request, router: WarmRouter) -> str | None:
        """Return the tenant of a request's key, None for all: for the operator, or if nobody has a key.

        Raises HTTPException, unless the key of a configured operator is sent where tenants are not separated.
        """
        sent = request.headers.get("authorization", "")
        if self._operator and hmac.compare_digest(sent.encode(), self._operator.encode()):
            return None
        try:
            tenant = router.tenant(request.headers.items())
        except RepeatedTenant as error:
            raise HTTPException(error.status_code, str(error)) from error
        if not tenant and self._operator:
            raise HTTPException(401, f"this needs the operator's key, {OPERATOR_KEY} of this application")
        return tenant or None

    def _router(self) -> WarmRouter | None:
        if self._handle is None:
            application, deployment = self._key
            self._handle = serve.get_deployment_handle(deployment, application)
            use_outside_of_replicas(self._handle)
        router: WarmRouter | None = router_for(deployment_key(*self._key))
        return router

    def _new_live(self, router: WarmRouter) -> Live:
        core = router.core
        about = {"engine": "vllm", "simulated": False, "policy": core.settings.policy, "ingresses": 1, "links": []}
        about |= {"model": router.model, "block_size": core.settings.block_size}
        table = PrefixTable(core.settings.block_size, lambda: SHOWN_TENANTS)
        return Live("ray", core, table, lambda: about, dict, self._look)

    async def _look(self, *_: Any, timeout_s: float) -> list[Any]:
        """Ask the replicas for their recent answers; only while clients watch."""
        assert self._handle is not None and self._live is not None
        replies = await self._handle.broadcast("recent_answers", self._numbers).results_async(timeout_s=timeout_s)
        counts = self._live.counts
        for replica, number, answers in replies:
            self._numbers[replica] = number
            for request_id, tenant, chain, prompt_tokens, cached, ttft_s in answers:
                counts.first_token(tenant, ttft_s, prompt_tokens, cached)
                counts.add("warmpath_requests_total", endpoint="chat", status="200", tenant=tenant)
                reason: Reason = "cached" if cached else "cold"
                decision = Decision(replica, "ray", 0, cached, cached, reason, 0.0, "", 0, None, time.monotonic())
                self._live.answered(Answered(request_id, tenant, chain, prompt_tokens, cached, ttft_s, decision))
        counts.keep(self._live.table.rooms)
        return []


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def build_cache_app(arguments: dict[str, Any]) -> Any:
    """Return the application. ``arguments``: the LLM server's ``application``, ``deployment`` and ``route_prefix``."""
    made = serve.deployment(CacheApp, name="cache", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)
    return made.bind(arguments["application"], arguments["deployment"], arguments.get("route_prefix", "/"))
