"""The HTTP front door: request -> tenant -> generations -> replica -> answer, whole or streamed.

Owns the routes and one process's tokenizer, counters and dispatcher. Knows no scoring and no engine. Every error
leaves in the shape of the API that was called.
"""

# No `from __future__ import annotations` here: Serve re-signs the routes' methods, and FastAPI could then no longer
# resolve annotations that are strings.
import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.protocol.samples import Sample
from router.serve.core_registry import core_for, decisions_for
from router.serve.request_router import deployment_key
from router.settings import RouterSettings
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.openai.response import adapter_body, error_body, model_body, models_body
from serve_app.api.request import GenerateRequest
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry, configured_adapters
from serve_app.checkpoints.checkpoint import load_checkpoint_info, resolve_model
from serve_app.checkpoints.drafter import with_drafter
from serve_app.checkpoints.limits import max_model_len
from serve_app.config.app import AppConfig
from serve_app.errors import (
    NotFound,
    WarmpathError,
)
from serve_app.generation.dispatch import Dispatcher
from serve_app.generation.prepare import Preparer
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.broadcast import Broadcast
from serve_app.ingress.completions import Completions
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.http import json_response, read_body
from serve_app.ingress.observe.cache_state import cache_state
from serve_app.ingress.observe.explain import Explainer
from serve_app.ingress.observe.metrics import IngressMetrics, render, with_label
from serve_app.ingress.observe.router_metrics import replica_samples, router_samples
from serve_app.prompts.registry import PublicPrompts
from serve_app.tenants.secret import load_secret
from serve_app.tenants.tenants import Tenants
from serve_app.tenants.usage import UsageTable
from serve_app.tokenization.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

http = FastAPI(title="warmpath", docs_url=None, redoc_url=None, openapi_url=None)


class MethodNotAllowed(NotFound):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


@http.exception_handler(HTTPException)
async def _routing_error(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods, in OpenAI's shape."""
    shown: WarmpathError = NotFound(f"There is no {request.url.path[:200]} here; GET /v1/models lists what is served.")
    if error.status_code == 405:
        shown = MethodNotAllowed(f"{request.method} is not allowed on {request.url.path[:200]}.")
    return json_response(error_body(shown), shown.status)


@serve.ingress(http)
class Ingress:
    """One ingress replica, and so one router."""

    async def __init__(self, config: dict[str, Any], replica: DeploymentHandle) -> None:  # type: ignore[misc]
        self._config = AppConfig.model_validate(config)
        path = await asyncio.to_thread(resolve_model, self._config.model)
        info = await asyncio.to_thread(load_checkpoint_info, path)
        info = await asyncio.to_thread(with_drafter, info, self._config)
        secret = load_secret(secret_file=self._config.secret_file)
        self._tenants = Tenants(self._config.tenants, secret, operator_key_sha256=self._config.operator_key_sha256)
        if self._tenants.open:
            logger.warning("no tenants are configured: everyone who can reach this port is the tenant `default`")
        self._max_model_len = max_model_len(self._config, info)
        self._tokenizer = await asyncio.to_thread(
            PromptTokenizer,
            path,
            cache_bytes=self._config.tokenizer_cache_bytes,
            block_size=self._config.block_size,
        )
        prompts = PublicPrompts(self._config.public_prompts)
        await asyncio.to_thread(prompts.install, self._tokenizer)
        self._created = int(time.time())
        self._adapters = AdapterRegistry(self._config.model_name)
        self._adapters.merge(await asyncio.to_thread(configured_adapters, self._config.lora_adapters))
        self._metrics = IngressMetrics()
        self._guard = RouteGuard(self._tenants, self._metrics, has_operators=bool(self._config.operator_key_sha256))
        self._metrics.tokenizer_cache_max_bytes.set(self._config.tokenizer_cache_bytes)
        self._traffic = UsageTable()
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._broadcast = Broadcast(replica, context.app_name, self._config.ingress_replicas)
        self._adapter_admin = AdapterAdmin(
            self._config, self._adapters, self._broadcast.replicas, self._broadcast.ingresses
        )
        deployment = deployment_key(context.app_name, replica.deployment_name)
        self._core = core_for(deployment, RouterSettings.from_json(self._config.routing()))
        preparer = Preparer(
            info,
            self._tokenizer,
            self._tenants,
            secret,
            model_name=self._config.model_name,
            max_model_len=self._max_model_len,
            default_max_tokens=self._config.default_max_tokens,
            save_ttl_s=self._config.save_ttl_s,
            adapters=self._adapters,
            prompts=prompts,
        )
        self._explainer = Explainer(self._core, preparer, self._tenants)
        self._completions = Completions(
            self._config,
            preparer,
            Dispatcher(replica, self._core, decisions_for(deployment), self._config.block_size, self._metrics.retried),
            self._tokenizer,
            self._metrics,
            self._traffic,
        )
        self._connecting = asyncio.create_task(self._broadcast.connect(self._adapters))
        self._synced = False

    # -- generation -----------------------------------------------------------------------------------------------

    @http.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._guard.answer(request, "chat", lambda: self._generate(request, parse_chat))

    @http.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """OpenAI's (legacy) completions."""
        return await self._guard.answer(request, "completions", lambda: self._generate(request, parse_completion))

    async def _generate(self, request: Request, parse: Callable[[bytes], GenerateRequest]) -> Response:
        arrived_s = time.perf_counter()
        tenant = self._guard.tenant(request)
        wanted = parse(await read_body(request, self._config.max_body_bytes))
        return await self._completions.respond(request, wanted, tenant, arrived_s)

    # -- models, health, operations -------------------------------------------------------------------------------

    @http.get("/v1/models")
    async def models(self, request: Request) -> Response:
        """The served model and the LoRA adapters that the caller may use."""

        async def work() -> Response:
            return json_response(models_body(self._models(request)))

        return await self._guard.answer(request, "models", work)

    @http.get("/v1/models/{model:path}")
    async def model(self, request: Request, model: str) -> Response:
        """One model by name."""

        async def work() -> Response:
            tenant = self._guard.tenant(request)
            self._adapters.choose(model, None, tenant.name)
            return json_response(next(one for one in self._models(request) if one["id"] == model))

        return await self._guard.answer(request, "models", work)

    def _models(self, request: Request) -> list[dict[str, Any]]:
        """The models of whoever asks; where files lie is shown to operators, and where nobody else is."""
        authorization = request.headers.get("authorization")
        operator = self._tenants.is_operator(authorization)
        adapters = self._adapters.visible(None if operator else self._guard.tenant(request).name)
        base = model_body(self._config.model_name, self._created, self._max_model_len)
        shows_paths = self._guard.sees_all(request)
        roots = (spec.path if shows_paths else PurePath(spec.path).name for spec in adapters)
        return [base, *(adapter_body(spec.name, root, base) for spec, root in zip(adapters, roots, strict=True))]

    @http.post("/v1/load_lora_adapter")
    async def load_lora_adapter(self, request: Request) -> Response:
        """Load an adapter on every replica and offer it under its name (vLLM's path)."""
        return await self._change_adapters(request, "load_lora_adapter", self._adapter_admin.load)

    @http.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(self, request: Request) -> Response:
        """Offer an adapter no longer; requests that have begun finish with it (vLLM's path)."""
        return await self._change_adapters(request, "unload_lora_adapter", self._adapter_admin.unload)

    async def _change_adapters(
        self, request: Request, endpoint: str, change: Callable[[bytes], Awaitable[str]]
    ) -> Response:
        async def work() -> Response:
            self._guard.require_operator(request)
            return Response(await change(await read_body(request, self._config.max_body_bytes)))

        return await self._guard.answer(request, endpoint, work)

    async def merge_adapters(self, entries: list[AdapterEntry]) -> None:
        """Take in what another ingress knows of adapters."""
        self._adapters.merge(entries)

    async def known_adapters(self) -> tuple[AdapterEntry, ...]:
        """Say which adapters this ingress knows, to one that has just started."""
        return self._adapters.entries()

    @http.get("/health")
    async def health(self, request: Request) -> Response:
        """200 once a request can be answered, and was routed knowing what every replica holds.

        Replicas that join later do not take it back: only a router that knew none of the caches would scatter prompts.
        """
        known = self._core.replica_ids
        if not self._synced and self._connecting.done():
            self._synced = self._core.knows_every_cache
        ready = self._synced and bool(known)
        body = {"status": "ok" if ready else "starting", "replicas": len(known)}
        return json_response(body, 200 if ready else 503)

    @http.get("/metrics")
    async def metrics(self, request: Request) -> Response:
        """The whole app's metrics as Prometheus text: every ingress, every replica."""

        async def work() -> Response:
            if not self._config.metrics_public:
                self._guard.require_operator(request)
            samples = replica_samples(self._core)
            if self._config.ingress_replicas == 1:
                samples += with_label(await self.ingress_samples(), "ingress", self._name)
            else:
                for name, more in await self._broadcast.ingresses("named_samples", timeout_s=5):
                    samples += with_label(more, "ingress", name)
            return Response(render(samples), media_type="text/plain; version=0.0.4; charset=utf-8")

        return await self._guard.answer(request, "metrics", work)

    async def named_samples(self) -> tuple[str, list[Sample]]:
        """This ingress' name and samples; called by whichever ingress is asked for /metrics."""
        return self._name, await self.ingress_samples()

    async def ingress_samples(self) -> list[Sample]:
        """What this ingress and its router have counted."""
        self._metrics.tokenizer_cache_bytes.set(self._tokenizer.stats().bytes)
        return [*self._metrics.samples(), *router_samples(self._core)]

    @http.get("/v1/cache/state")
    async def state(self, request: Request) -> Response:
        """What the caches hold, as this ingress' router sees it."""

        async def work() -> Response:
            self._guard.require_operator(request)
            document = cache_state(
                self._core,
                self._traffic,
                self._tokenizer.stats(),
                model=self._config.model_name,
                engine=self._config.engine,
            )
            return json_response(document)

        return await self._guard.answer(request, "cache_state", work)

    @http.post("/v1/cache/explain")
    async def explain(self, request: Request) -> Response:
        """Where a request would go now, and why; nothing is sent, reserved or counted."""

        async def work() -> Response:
            self._guard.require_operator(request)
            return json_response(await self._explainer.explain(await read_body(request, self._config.max_body_bytes)))

        return await self._guard.answer(request, "cache_explain", work)

    @http.post("/reset_prefix_cache")
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget every cached block that is not in use, on every replica (vLLM's path)."""

        async def work() -> Response:
            self._guard.require_operator(request)
            complete = await self._broadcast.replicas("reset_prefix_cache", timeout_s=30)
            return json_response({"complete": all(complete)})

        return await self._guard.answer(request, "reset_prefix_cache", work)
