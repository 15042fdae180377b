"""The parts of one ingress, and operations of routes that need several parts. `assembly.py` builds it."""

import asyncio
import logging
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from starlette.requests import Request

from router.core import RoutingCore
from router.protocol.autoscaling import IngressFigures
from router.protocol.samples import Sample
from router.settings import RouterSettings
from serve_app.api.anthropic.history import MessageHistory
from serve_app.api.openai.response import adapter_body
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.config.app import AppConfig
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.generation.prepare import Limits, Preparer
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.broadcast import Broadcast
from serve_app.ingress.completions import Completions
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.http import credentials, read_body
from serve_app.ingress.ledgers import Ledgers
from serve_app.ingress.observe import metrics as figures
from serve_app.ingress.observe.cache_state import cache_state
from serve_app.ingress.observe.sessions import SessionList
from serve_app.ingress.prompts.admin import PromptAdmin
from serve_app.live.live import Live
from serve_app.notices import read, read_shown
from serve_app.prompts.registry import Prompts
from serve_app.prompts.traffic import version_samples
from serve_app.replica.token_channel import TokenReceiver
from serve_app.stored.responses import StoredResponses
from serve_app.tenants.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

BODIES = 8
"""The number of bodies of maximum size that an ingress holds before admission, over all tenants."""


@dataclass(slots=True)
class Services:
    """The parts of one ingress. ``base_model``: its description for clients. ``config``: the settings in force.

    ``connecting`` is done once replicas and ingresses answer. ``refused_settings``: why the newest are not in force.
    ``stored`` None: no responses are stored.
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
    metrics: figures.IngressMetrics
    guard: RouteGuard
    shares: Shares
    limits: TenantLimits
    front_door: FrontDoor
    broadcast: Broadcast
    adapter_admin: AdapterAdmin
    prompt_admin: PromptAdmin
    completions: Completions
    connecting: asyncio.Task[None]
    drain: Drain
    history: MessageHistory
    usage: Ledgers
    sessions: SessionList
    live: Live
    receiver: TokenReceiver
    tracer: Tracer | None = None
    stored: StoredResponses | None = None
    refused_settings: str = ""
    _synced: bool = False

    async def configure(self, config: AppConfig) -> None:
        """Apply other live settings; running requests keep their old ones."""
        # The slow step, which could fail, is first. All others run between two requests.
        await self.prompts.replace(self.tokenizer, config.public_prompts)
        self.core.configure(RouterSettings.from_json(config.routing()))
        self.tenants.configure(config.tenants, config.operator_key_sha256)
        self.metrics.expect(self.tenants.by_name)
        self.shares.set_weights(config.cache_shares)
        self.limits.configure(config.tenants)
        self.front_door.max_waiting = config.max_queued_requests
        self.front_door.max_bytes = BODIES * config.max_body_bytes
        self.guard.allowed_hosts = config.allowed_hosts
        self.adapter_admin.config = self.completions.config = self.config = config
        self.preparer.configure(limits_of(config, self.base_model["max_model_len"]))

    def ready(self) -> bool:
        """Return whether requests can be routed: every cache was known once. Later replicas change nothing."""
        if not self._synced and self.connecting.done():
            self._synced = self.core.knows_every_cache
        return self._synced and bool(self.core.replica_ids)

    async def body(self, request: Request) -> bytes:
        """Return the request's body. Raises RequestTooLarge and RequestTimeout."""
        return await read_body(request, self.config.max_body_bytes)

    def models(self, request: Request) -> list[dict[str, Any]]:
        """Return the caller's models; operators, and callers of an open deployment, see the files' full paths."""
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

    def autoscaling_stats(self) -> dict[str, float]:
        """Return this ingress' figures for the autoscaling policy; none if that is off. Never raises."""
        try:
            if self.config.autoscaling is None:
                return {}
            times, working_set_tokens = self.core.demand()
            return IngressFigures(
                waiting_requests=self.front_door.waiting().total(),
                working_set_tokens=working_set_tokens,
                **asdict(times),
                **self.config.autoscaling.model_dump(),
            ).to_floats()
        except Exception:  # after an error, Serve would stop asking
            logger.exception("no figures for autoscaling")
            return {}

    def samples(self) -> list[Sample]:
        """Return the samples of this ingress and its router."""
        streams = figures.samples_of({"warmpath_event_streams": self.live.watchers})
        samples = [*self.metrics.samples(), *figures.router_samples(self.core), *streams]
        samples += self.front_door.samples()
        versions, _ = self.prompt_admin.traffic.report()
        return [*samples, *version_samples(versions)]

    async def all_samples(self) -> list[Sample]:
        """Return the samples of every ingress and every replica."""
        samples = figures.replica_samples(self.core)
        if self.config.autoscaling is not None:
            notices = await asyncio.to_thread(read, self.app_name, "autoscaling")
            samples += figures.autoscaling_samples(notices)
        ingresses = await self.broadcast.ingresses("named_samples", timeout_s=5) or [(self.name, self.samples())]
        for name, more in ingresses:
            samples += figures.with_label(more, "ingress", name)
        return samples

    async def cache_state(self) -> dict[str, Any]:
        """Return the content of the caches, as this ingress' router sees it."""
        model, engine = self.config.model_name, self.config.engine
        notices = await asyncio.to_thread(read_shown, self.app_name)
        return cache_state(
            self.core, self.metrics.totals(), self.tokenizer.stats(), notices, model=model, engine=engine
        )


def limits_of(config: AppConfig, model_len: int) -> Limits:
    """Return the limits of generations, in tokens, and of saves; ``model_len``: the model's maximum length."""
    return Limits(model_len, config.default_max_tokens, config.save_ttl_s)
