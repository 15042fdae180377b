"""What one ingress is made of, and what its routes ask of several parts at once. `assembly.py` puts it together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.core import RoutingCore
from router.protocol.samples import Sample
from router.settings import RouterSettings
from serve_app.api.anthropic.history import MessageHistory
from serve_app.api.format import AnswerFormat
from serve_app.api.openai.response import adapter_body
from serve_app.api.request import ChatRequest, GenerateRequest
from serve_app.api.unknown import require_none, unknown_fields
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.config.app import AppConfig
from serve_app.fairness.front_door import Arrival, FrontDoor
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.fairness.workers import FairWorkers
from serve_app.generation.prepare import Limits, Preparer
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.broadcast import Broadcast
from serve_app.ingress.completions import Completions
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.http import credentials, read_body
from serve_app.ingress.ledgers import Ledgers
from serve_app.ingress.observe.autoscaling_stats import autoscaling_samples, ingress_figures
from serve_app.ingress.observe.cache_state import NOTICES, HitRates, cache_state
from serve_app.ingress.observe.explain import Explainer
from serve_app.ingress.observe.health import Health
from serve_app.ingress.observe.metrics import IngressMetrics, with_label
from serve_app.ingress.observe.router_metrics import replica_samples, router_samples
from serve_app.ingress.prompts.admin import PromptAdmin
from serve_app.live.live import Live
from serve_app.notices import read, read_kinds
from serve_app.prompts.registry import Prompts
from serve_app.prompts.traffic import version_samples
from serve_app.replica.token_channel import TokenReceiver
from serve_app.tenants.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

INLINE_BODY_BYTES = 64 << 10
"""Longer bodies are parsed off the loop."""

BODIES = 8
"""How many bodies of the greatest size an ingress holds before they are admitted, over all tenants."""


@dataclass(slots=True)
class Services:
    """The parts of one ingress. ``name``: its replica's id; ``base_model``: the served model as clients see it.

    ``config``: the settings in force, which ``configure`` replaces. ``refused_settings``: why the newest are not.
    """

    config: AppConfig
    app_name: str
    name: str
    base_model: dict[str, Any]
    tenants: Tenants
    adapters: AdapterRegistry
    tokenizer: PromptTokenizer
    prompts: Prompts
    preparer: Preparer
    core: RoutingCore
    metrics: IngressMetrics
    traffic: HitRates
    guard: RouteGuard
    shares: Shares
    limits: TenantLimits
    front_door: FrontDoor
    workers: FairWorkers
    broadcast: Broadcast
    adapter_admin: AdapterAdmin
    prompt_admin: PromptAdmin
    explainer: Explainer
    completions: Completions
    health: Health
    drain: Drain
    history: MessageHistory
    usage: Ledgers
    live: Live
    receiver: TokenReceiver
    tracer: Tracer | None = None
    refused_settings: str = ""

    async def configure(self, config: AppConfig) -> None:
        """Put other live settings into force; requests that have begun go on with those that they began with."""
        # First what takes time, and could fail. All else happens between two requests.
        await self.prompts.replace(self.tokenizer, config.public_prompts)
        self.core.configure(RouterSettings.from_json(config.routing()))
        self.tenants.configure(config.tenants, config.operator_key_sha256)
        self.shares.set_weights(config.cache_shares)
        self.limits.configure(config.tenants)
        self.front_door.max_waiting = config.max_queued_requests
        self.front_door.max_bytes = BODIES * config.max_body_bytes
        self.guard.allowed_hosts = config.allowed_hosts
        self.adapter_admin.config = config
        self.completions.request_timeout_s = config.request_timeout_s
        self.preparer.configure(limits_of(config, self.base_model["max_model_len"]))
        self.config = config

    async def generate(
        self, request: Request, parse: Callable[[bytes], GenerateRequest], answer_format: AnswerFormat
    ) -> Response:
        """Answer a request for text in an API's format. Raises a ``WarmpathError`` before the first token."""
        arrived_s = time.perf_counter()
        tenant = self.guard.tenant(request)
        with self.front_door.arrive(tenant.name) as arrival:
            wanted = await self._wanted(request, tenant, arrival, parse)
            return await self.completions.respond(request, wanted, answer_format, tenant, arrival, arrived_s)

    async def count_tokens(self, request: Request, parse: Callable[[bytes], ChatRequest]) -> int:
        """Return how many tokens the prompt of a request has. Raises a ``WarmpathError``."""
        tenant = self.guard.tenant(request)
        with self.front_door.arrive(tenant.name) as arrival:
            wanted = await self._wanted(request, tenant, arrival, parse)
            assert isinstance(wanted, ChatRequest)
            return await self.preparer.count(wanted, tenant)

    async def _wanted(
        self, request: Request, tenant: Tenant, arrival: Arrival, parse: Callable[[bytes], GenerateRequest]
    ) -> GenerateRequest:
        """Return what a request's body asks for. Raises a ``WarmpathError``."""
        body = await read_body(request, self.config.max_body_bytes, arrival.grow)
        if len(body) <= INLINE_BODY_BYTES:
            wanted = parse(body)
        else:
            wanted = await self.workers.run(tenant.name, len(body), parse, body)
        if isinstance(wanted, ChatRequest) and wanted.chat_template_kwargs:
            unread = self.tokenizer.template.unread(wanted.chat_template_kwargs)
            more = unknown_fields((f"chat_template_kwargs.{name}" for name in unread), ())
            wanted = replace(wanted, unknown=(*wanted.unknown, *more))
        if self.config.strict:
            require_none(wanted.unknown)
        return wanted

    async def body(self, request: Request) -> bytes:
        """Return the request's body. Raises RequestTooLarge and RequestTimeout."""
        return await read_body(request, self.config.max_body_bytes)

    def models(self, request: Request) -> list[dict[str, Any]]:
        """Return the models of whoever asks; where files lie is shown to operators, and where nobody else is."""
        operator = self.tenants.is_operator(credentials(request))
        tenant = None if operator else self.guard.tenant(request)
        names = None if tenant is None else tenant.models
        specs = self.adapters.visible(None if tenant is None else tenant.name, names)
        shows_paths = self.guard.sees_all(request)
        roots = (spec.path if shows_paths else PurePath(spec.path).name for spec in specs)
        base = self.base_model
        adapters = [adapter_body(spec.name, root, base) for spec, root in zip(specs, roots, strict=True)]
        if self.adapters.base_visible(names):
            return [base, *adapters]
        return [{**adapter, "parent": None} for adapter in adapters]

    def samples(self) -> list[Sample]:
        """Return what this ingress and its router have counted."""
        tokenizer_cache = self.tokenizer.stats()
        self.metrics.tokenizer_cache_bytes.set(tokenizer_cache.bytes)
        self.metrics.tokenizer_cache_max_bytes.set(tokenizer_cache.max_bytes)
        self.metrics.event_streams.set(self.live.watchers)
        self.metrics.waiting.clear()
        for tenant, requests in self.front_door.waiting().items():
            self.metrics.waiting.labels(tenant).set(requests)
        versions, _ = self.prompt_admin.traffic.report()
        return [*self.metrics.samples(), *version_samples(versions), *router_samples(self.core)]

    def autoscaling_stats(self) -> dict[str, float]:
        """Return this ingress' figures for the autoscaling policy; none where that is off. Never raises."""
        try:
            if self.config.autoscaling is None:
                return {}
            waiting = self.front_door.waiting().total()
            return ingress_figures(self.core.demand(), waiting, self.config.autoscaling).to_floats()
        except Exception:  # Serve would ask no more
            logger.exception("no figures for autoscaling")
            return {}

    async def all_samples(self) -> list[Sample]:
        """Return what every ingress and every replica has counted."""
        samples = replica_samples(self.core)
        if self.config.autoscaling is not None:
            samples += autoscaling_samples(await asyncio.to_thread(read, self.app_name, "autoscaling"))
        if self.config.ingress_replicas == 1:
            return samples + with_label(self.samples(), "ingress", self.name)
        for name, more in await self.broadcast.ingresses("named_samples", timeout_s=5):
            samples += with_label(more, "ingress", name)
        return samples

    async def cache_state(self) -> dict[str, Any]:
        """Return what the caches hold, as this ingress' router sees it."""
        model, engine = self.config.model_name, self.config.engine
        notices = await asyncio.to_thread(read_kinds, self.app_name, NOTICES)
        return cache_state(self.core, self.traffic, self.tokenizer.stats(), notices, model=model, engine=engine)


def limits_of(config: AppConfig, model_len: int) -> Limits:
    """Return how long generations may be, in tokens, and saves stay; ``model_len``: the most the model takes."""
    return Limits(model_len, config.default_max_tokens, config.save_ttl_s)
