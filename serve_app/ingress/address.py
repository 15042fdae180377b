"""One address of the API: what all models share, the models, and which of them a name means for whom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from starlette.requests import Request

from serve_app.checkpoints.adapter_registry import no_such_model
from serve_app.config.app import AppConfig
from serve_app.errors import AuthenticationFailed, InvalidRequest, Overloaded, RateLimited
from serve_app.fairness.front_door import Arrival, FrontDoor
from serve_app.ingress.batches import BatchDesk
from serve_app.ingress.http import credentials
from serve_app.ingress.model import Model
from serve_app.ingress.shared import BODIES, Shared
from serve_app.ingress.traffic_log import TrafficLog
from serve_app.tenants import Tenant

logger = logging.getLogger(__name__)

FallbackCause = Literal["down", "full", "asleep"]

Needs = Literal["replica", "replica later", "tokenizer"]
"""What of a model a request needs: a replica now, one that may first start (a batch's line), or a tokenizer."""

DOWN_AGAIN_S = 10.0
"""When to send a request again to a model that this ingress cannot serve."""


class Fallback(NamedTuple):
    """Why another model answers for the one that a request names."""

    model: str
    cause: FallbackCause

    def __str__(self) -> str:
        return f"{self.model} is {self.cause}: its fallback answers"


class Chosen(NamedTuple):
    """Who answers a request for a model, and under which name. ``fallback``: None if the model itself does."""

    model: Model
    name: str
    fallback: Fallback | None = None


@dataclass(eq=False, kw_only=True)
class Address(Shared):
    """The models by name, at least one, in the order of the settings."""

    models: dict[str, Model]
    hall: FrontDoor
    """Where requests wait until they have chosen one of several models."""
    batches: BatchDesk | None
    """None: no files and batches are stored."""
    traffic_log: TrafficLog
    fallbacks: Mapping[str, str]
    """Those of the settings."""
    down: dict[str, str] = field(default_factory=dict)
    """Why others of the settings cannot be served here."""
    refused_settings: str = ""
    """Why the newest settings are not in force, "" if they are."""

    @property
    def first(self) -> Model:
        """The first of the served models."""
        return next(iter(self.models.values()))

    @property
    def entrance(self) -> FrontDoor:
        """Where requests arrive: at the only model's own door, if clients do not choose one."""
        return self.hall if self.several else self.first.front_door

    # The settings.

    async def configure(self, config: AppConfig) -> None:
        """Apply other live settings. Raises ValueError; nothing changes then."""
        # The steps that could fail are first. All others run between two requests.
        self.budgets.require_database(config.tenants)
        served = {name: own for name, own in config.served().items() if name in self.models}
        replaced: list[Model] = []
        try:
            for name, own in served.items():
                await self.models[name].replace_prompts(own)
                replaced.append(self.models[name])
        except Exception:
            for model in replaced:
                await model.replace_prompts(model.config)
            raise
        self.registry.declare(config)
        self._use(config, served)

    def tenants_changed(self) -> None:
        """Put the tenants and keys that the registry knows in force, for every model."""
        self._use(self.config, {name: model.config for name, model in self.models.items()})

    def _use(self, config: AppConfig, served: Mapping[str, AppConfig]) -> None:
        config = self.registry.in_force(config)
        self.budgets.configure(config.tenants, config.prices)
        self.tenants.configure(
            config.tenants, config.operator_key_sha256, config.aliases, refusal=self.registry.refusal
        )
        self.shares.set_weights(config.cache_shares)
        self.limits.configure(config.tenants)
        self.guard.configure(config.allowed_hosts, config.allowed_origins)
        self.metrics.expect(self.tenants.by_name)
        self.hall.configure(config.max_queued_requests, BODIES * config.max_body_bytes)
        for name, own in served.items():
            self.models[name].configure(self.registry.in_force(own))
        if self.batches is not None:
            self.batches.worker.limits_changed()
        self.traffic_log.configure(config)
        self.config = config

    # Which model is meant.

    def of_query(self, request: Request) -> Model:
        """Return the model of a request's query (``?model=``), else the caller's first one.

        Raises ModelNotFound for one that the caller may not use, AuthenticationFailed, and Overloaded.
        """
        name = request.query_params.get("model")
        if name is not None:
            return self._named(self.config.aliases.get(name, name), self._caller(request))
        try:
            tenant = self._caller(request)
        except AuthenticationFailed:  # what needs a key asks for it
            return self.first
        return self._first_of(tenant)

    def default_model(self, request: Request, tenant: Tenant) -> str:
        """Return the name of the model for a tenant's body without one. Raises the errors of ``of_query``."""
        return (self.of_query(request) if "model" in request.query_params else self._first_of(tenant)).name

    def of_query_alone(self, request: Request) -> Model:
        """Return the model of a request's query, which must name it if there are several. Raises InvalidRequest."""
        if self.several and "model" not in request.query_params:
            names = ", ".join(self.models)
            raise InvalidRequest(f"Name the model in the URL: ?model=NAME, one of {names}.", param="model")
        return self.of_query(request)

    def explained(self, name: str | None, tenant: Tenant | None) -> Model:
        """Return the model of a tenant's request to explain; without a name, or a tenant, its first one."""
        if name is None or tenant is None:
            return self._first_of(tenant)
        return self._named(self.config.aliases.get(name, name), tenant)

    def labelled(self, label: str) -> Model:
        """Return the model that another ingress calls so: "" is the only one. Raises KeyError."""
        return self.models[label] if self.several else self.first

    def has(self, label: str) -> bool:
        """Return whether ``labelled`` has that model: during a rolling update, ingresses differ."""
        return not self.several or label in self.models

    def choose(
        self, name: str, adapter: str | None, tenant: Tenant, arrival: Arrival, needs: Needs = "replica"
    ) -> Chosen:
        """Return who answers a tenant's request for a model, and let it wait there.

        A model with a ``fallback`` that has no replica, or whose queue is full, leaves its requests to that, if the
        tenant may use it; those for an ``adapter`` stay. One that is asleep starts meanwhile. Raises ModelNotFound,
        RateLimited and Overloaded.
        """
        name = self.config.aliases.get(name, name)
        other = self._fallback(name, tenant) if adapter is None else None
        own = self.models.get(name)
        if other is None or (own is not None and needs == "tokenizer"):
            model = self._named(name, tenant)
            arrival.move(model.front_door)
            return Chosen(model, name)
        if own is None or not own.may_answer:
            return self._fall_back(name, other, arrival, "down")
        if own.asleep and not other.asleep and needs == "replica":
            with suppress(RateLimited, Overloaded):
                return self._fall_back(name, other, arrival, "asleep", starts=own)
        try:
            arrival.move(own.front_door)
        except (RateLimited, Overloaded):
            return self._fall_back(name, other, arrival, "full")
        return Chosen(own, name)

    def _fall_back(
        self, name: str, other: Model, arrival: Arrival, why: FallbackCause, starts: Model | None = None
    ) -> Chosen:
        """Let a model's request wait at its fallback. ``starts``: the model, if it is to start meanwhile."""
        arrival.move(other.front_door, instead_of=None if starts is None else starts.front_door)
        return Chosen(other, other.name, Fallback(name, why))

    def _fallback(self, name: str, tenant: Tenant) -> Model | None:
        """Return who answers for a model that is down or full, if it can, and its tenant may use both."""
        other = self.models.get(self.fallbacks.get(name, ""))
        if other is None or not other.may_answer or not other.serves(other.name, tenant):
            return None
        return other if tenant.models is None or name in tenant.models else None

    def _caller(self, request: Request) -> Tenant | None:
        """Return the caller's tenant, or None for one who sees all. Raises AuthenticationFailed."""
        return None if self.guard.sees_all(request) else self.guard.tenant(request)

    def _first_of(self, tenant: Tenant | None) -> Model:
        if len(self.models) == 1:
            return self.first
        return next((model for model in self.models.values() if model.names(tenant)), self.first)

    def _named(self, name: str, tenant: Tenant | None) -> Model:
        """Return the model of a model's or an adapter's name, if the caller may use it."""
        for model in self.models.values():
            if model.serves(name, tenant):
                return model
        allowed = tenant is None or tenant.models is None or name in tenant.models
        if name in self.down and allowed:
            message = f"The model {name!r} cannot be served now; the operator sees why in /health."
            raise Overloaded(message, code="model_down", retry_after_s=DOWN_AGAIN_S)
        for model in self.models.values():
            if allowed:
                model.adapters.require_current()
        raise no_such_model(name, [name for model in self.models.values() for name in model.names(tenant)])

    def taken(self, name: str) -> bool:
        """Return whether a model or an adapter has this name."""
        return name in self.down or any(model.serves(name) for model in self.models.values())

    def cards(self, request: Request) -> list[dict[str, Any]]:
        """Return the models, adapters and aliases that the caller may use, as in ``/v1/models``.

        Operators, and callers of an open deployment, see full paths.
        """
        tenant = None if self.tenants.is_operator(credentials(request)) else self.guard.tenant(request)
        shows_paths, aliases = self.guard.sees_all(request), self.tenants.aliases
        return [
            card for model in self.models.values() for card in model.cards(tenant, aliases, shows_paths=shows_paths)
        ]

    # The state of all.

    def ready(self, model: Model) -> bool:
        """Return whether a model answers requests here."""
        return model.ready() and not self.tenants.refusal

    async def close_sessions(self, tenant: str, names: Sequence[str]) -> int:
        """End a tenant's sessions of some names everywhere; return how many replicas had one. Raises Overloaded."""
        if not await self.broadcast.ingresses("close_sessions", tenant, names, timeout_s=5):
            self.session_limit.close(tenant, names)
        return sum([await model.sessions.close(tenant, names) for model in self.models.values()])

    def other_versions(self) -> dict[str, int]:
        """Return the replicas and ingresses whose messages this release does not read, and their versions."""
        replicas = {name: version for one in self.models.values() for name, version in one.core.other_versions.items()}
        return replicas | self.broadcast.other_versions()

    def scaling_figures(self) -> dict[str, float]:
        """Return this ingress' figures for the models' autoscaling policies. Never raises."""
        try:
            return {name: value for model in self.models.values() for name, value in model.scaling_figures().items()}
        except Exception:  # after an error, Serve would stop asking
            logger.exception("no figures for autoscaling")
            return {}

    async def stop(self, timeout_s: float) -> int:
        """Refuse new requests, wait for running answers, and end the late ones; return the number of those."""
        for model in self.models.values():
            model.live.close()
        if self.batches is not None:
            await self.batches.worker.stop()
        ended = await self.drain.run(timeout_s)
        await self.traffic_log.close()
        self.outside.close()
        await self.usage.flush()
        await self.budgets.flush()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        return ended
