"""The served models of one ingress, and which of them a name means for whom.

Each has ``Services`` of its own: router, tokenizer, adapters, limits, queue and counts. Keys, tenants, usage and stored
responses are common to all.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request

from router.protocol.samples import Sample
from serve_app.checkpoints.adapter_registry import no_such_model
from serve_app.config.app import AppConfig
from serve_app.errors import AuthenticationFailed, Overloaded, RateLimited
from serve_app.fairness.front_door import Arrival, FrontDoor
from serve_app.ingress.broadcast import Broadcast, is_starting, message_of
from serve_app.ingress.completions import Chosen, Needs
from serve_app.ingress.observe.metrics import IngressMetrics, with_label
from serve_app.tenants import Tenant

if TYPE_CHECKING:
    from serve_app.ingress.services import Services

BODIES = 8
"""The number of bodies of maximum size that an ingress holds before admission, over all tenants."""

FallbackCause = Literal["down", "full", "asleep"]

SAID_S = 5.0
"""The lifetime of a message of Serve."""

STARTING_S = 1.0
"""The time for which an answer of Serve's counts, while requests wait for a replica."""

DOWN_AGAIN_S = 10.0
"""When to send a request again to a model that this ingress cannot serve."""


@dataclass(slots=True)
class Models:
    """The models by name, in the order of the settings. ``down``: why others of the settings cannot be served here.

    ``config``: the settings of all that are in force. ``entrance``: where requests arrive; ``metrics``: counts those
    that chose no model. ``broadcast``: to all ingresses. ``fallbacks``: those of the settings.
    """

    config: AppConfig
    entrance: FrontDoor
    metrics: IngressMetrics
    broadcast: Broadcast
    served: dict[str, Services] = field(default_factory=dict)
    down: dict[str, str] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(init=False)
    _said: dict[str, tuple[float, str]] = field(default_factory=dict)
    _starting: dict[str, tuple[float, asyncio.Task[bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fallbacks = {name: one.fallback for name, one in self.config.served().items() if one.fallback is not None}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of models and adapters."""
        return self.config.aliases

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prefill rate of a replica of the fastest model, 0.0 while unknown."""
        return max(services.fleet.core.loads.prefill_tokens_per_s for services in self.served.values())

    @property
    def first(self) -> Services:
        """The first of the served models."""
        return next(iter(self.served.values()))

    async def configure(self, config: AppConfig) -> None:
        """Apply other live settings of all models."""
        done: list[Services] = []
        try:
            for name, one in config.served().items():
                if name in self.served:
                    await self.served[name].configure(one)
                    done.append(self.served[name])
        except Exception:  # what is refused for one has changed none
            before = self.config.served()
            for services in done:
                await services.configure(before[services.config.model_name])
            raise
        self.config = config
        self.metrics.expect(self.first.access.tenants.by_name)
        self.entrance.configure(config.max_queued_requests, BODIES * config.max_body_bytes)

    def samples(self) -> list[Sample]:
        """Return the samples of this ingress, those of a model with its name."""
        samples = [*self.metrics.samples(), *self.entrance.samples()]
        for name, services in self.served.items():
            samples += with_label(services.own_samples(), "model", name)
        return samples

    def asked(self, request: Request) -> Services:
        """Return the model of a request's query (``?model=``), else the caller's first one.

        Raises ModelNotFound for one that the caller may not use, AuthenticationFailed, and Overloaded.
        """
        name = request.query_params.get("model")
        if name is not None:
            return self._named(self.aliases.get(name, name), self._caller(request))
        try:
            tenant = self._caller(request)
        except AuthenticationFailed:  # what needs a key asks for it
            return self.first
        return self._first_of(tenant)

    def explained(self, name: str | None, tenant: Tenant | None) -> Services:
        """Return the model of a tenant's request to explain; without a name, or a tenant, its first one."""
        if name is None or tenant is None:
            return self._first_of(tenant)
        return self._named(self.aliases.get(name, name), tenant)

    async def health(self) -> dict[str, Any]:
        """Return each model's status and number of replicas, and why it has none."""
        shown: dict[str, Any] = {name: {"status": "down", "replicas": 0, "why": why} for name, why in self.down.items()}
        for name, services in self.served.items():
            replicas = len(services.fleet.core.replica_ids)
            shown[name] = {"status": "ok" if services.ready() else "starting", "replicas": replicas}
            if not replicas and (why := await self._message(services)):
                shown[name]["why"] = why
        return shown

    async def _message(self, services: Services) -> str:
        """Return what Serve says of a model's replicas; probes share an answer."""
        name, now_s = services.config.model_name, time.monotonic()
        if name not in self._said or now_s - self._said[name][0] > SAID_S:
            self._said[name] = now_s, await asyncio.to_thread(message_of, *services.deployment)
        return self._said[name][1]

    async def starting(self, name: str) -> bool:
        """Return whether requests for a model may wait for a replica that starts; all who ask share an answer."""
        now_s = time.monotonic()
        asked_s, answer = self._starting.get(name, (-math.inf, None))
        if answer is None or now_s - asked_s > STARTING_S:
            core = self.served[name].fleet.core
            unheard = not core.all_out and not core.other_versions  # else those that run cannot take the request
            ask = asyncio.to_thread(is_starting, *self.served[name].deployment, unheard=unheard)
            answer = asyncio.create_task(ask)
            self._starting[name] = now_s, answer
        return await asyncio.shield(answer)

    def _first_of(self, tenant: Tenant | None) -> Services:
        return next((services for services in self.served.values() if _names(services, tenant)), self.first)

    def choose(
        self, name: str, adapter: str | None, tenant: Tenant, arrival: Arrival, needs: Needs = "replica"
    ) -> Chosen:
        """Return who answers a tenant's request for a model, and let it wait there.

        A model with a ``fallback`` that has no replica, or whose queue is full, leaves its requests to that, if the
        tenant may use it; those for an ``adapter`` stay. One that is asleep starts meanwhile. ``needs``: a replica now,
        one that may first start (a batch's line), or a tokenizer. Raises ModelNotFound, RateLimited and Overloaded.
        """
        name = self.aliases.get(name, name)
        other = self._fallback(name, tenant) if adapter is None else None
        own = self.served.get(name)
        if other is None or (own is not None and needs == "tokenizer"):
            found = self._named(name, tenant)
            arrival.move(found.access.front_door)
            return Chosen(found.completions, name)
        if own is None or not own.may_answer:
            return self._fall_back(name, other, arrival, "down")
        sleeps = own.asleep and not other.asleep and needs == "replica"
        if sleeps:
            with suppress(RateLimited, Overloaded):
                return self._fall_back(name, other, arrival, "asleep", starts=own)
        try:
            arrival.move(own.access.front_door)
        except (RateLimited, Overloaded):
            return self._fall_back(name, other, arrival, "full")
        return Chosen(own.completions, name)

    def _fall_back(
        self, name: str, other: Services, arrival: Arrival, why: FallbackCause, starts: Services | None = None
    ) -> Chosen:
        """Let a model's request wait at its fallback. ``starts``: the model, if it is to start meanwhile."""
        arrival.move(other.access.front_door, instead_of=None if starts is None else starts.access.front_door)
        self.metrics.add("warmpath_fallbacks_total", model=name, fallback=other.config.model_name, cause=why)
        return Chosen(other.completions, other.config.model_name, f"{name} is {why}: its fallback answers")

    def listed(self, request: Request) -> list[dict[str, Any]]:
        """Return the models, adapters and aliases that the caller may use, as in ``/v1/models``."""
        return [one for services in self.served.values() for one in services.own_models(request)]

    def taken(self, name: str) -> bool:
        """Return whether a model or an adapter has this name."""
        return name in self.down or any(_may_use(services, name, None) for services in self.served.values())

    def _fallback(self, name: str, tenant: Tenant) -> Services | None:
        """Return who answers for a model that is down or full, if it can, and its tenant may use both."""
        own = self.fallbacks.get(name)
        other = self.served.get(own) if own is not None else None
        if other is None or not other.may_answer or not _may_use(other, other.config.model_name, tenant):
            return None
        return other if tenant.models is None or name in tenant.models else None

    def _caller(self, request: Request) -> Tenant | None:
        """Return the caller's tenant, or None for one who sees all. Raises AuthenticationFailed."""
        guard = self.first.access.guard
        return None if guard.sees_all(request) else guard.tenant(request)

    def _named(self, name: str, tenant: Tenant | None) -> Services:
        """Return the model of a model's or an adapter's name, if the caller may use it."""
        for services in self.served.values():
            if _may_use(services, name, tenant):
                return services
        if name in self.down and (tenant is None or tenant.models is None or name in tenant.models):
            message = f"The model {name!r} cannot be served now; the operator sees why in /health."
            raise Overloaded(message, code="model_down", retry_after_s=DOWN_AGAIN_S)
        known = [name for services in self.served.values() for name in _names(services, tenant)]
        for services in self.served.values():
            if tenant is None or tenant.models is None or name in tenant.models:
                services.catalog.adapters.require_current()
        raise no_such_model(name, known)


def _may_use(services: Services, name: str, tenant: Tenant | None) -> bool:
    if tenant is None:
        return name == services.config.model_name or services.catalog.adapters.get(name) is not None
    return services.catalog.adapters.serves(name, tenant.name, tenant.models)


def _names(services: Services, tenant: Tenant | None) -> list[str]:
    """Return the names of a model and its adapters that the caller may use."""
    adapters, models = services.catalog.adapters, None if tenant is None else tenant.models
    base = [services.config.model_name] if adapters.base_visible(models) else []
    return [*base, *(spec.name for spec in adapters.visible(None if tenant is None else tenant.name, models))]
