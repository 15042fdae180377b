"""The parts of one ingress, and operations of routes that need several parts. `assembly.py` builds it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from starlette.requests import Request

from router.background import FAILING, LOOPS
from router.core import RoutingCore
from router.protocol.autoscaling import IngressFigures
from router.protocol.samples import Sample
from router.settings import RouterSettings
from serve_app.api.anthropic.history import MessageHistory
from serve_app.api.openai.response import adapter_body
from serve_app.budgets import Budgets
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.config.app import AppConfig
from serve_app.engine.token_channel import TokenReceiver
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.generation.prepare import Limits, Preparer
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.batches import BatchDesk
from serve_app.ingress.broadcast import Broadcast
from serve_app.ingress.completions import Completions
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.http import credentials, read_body
from serve_app.ingress.models import BODIES, Models
from serve_app.ingress.observe import metrics as figures
from serve_app.ingress.observe.reports import SessionList, Shared, cache_state, explanation, names_in
from serve_app.ingress.observe.tenants import held_tokens, refusals_by_tenant, spent_today, tenant_rows
from serve_app.ingress.prompts import PromptAdmin
from serve_app.ingress.tenant_admin import TenantAdmin
from serve_app.live.journal import Journal, RequestRow, latest
from serve_app.live.live import Live
from serve_app.live.tally import WINDOWS_S, Bucket, begin_of, sums_of
from serve_app.notices import read, read_shown
from serve_app.prompts.registry import Prompts, version_samples
from serve_app.stored.responses import StoredResponses
from serve_app.tenancy.registry import TenantRegistry
from serve_app.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.tracing import Tracer
from serve_app.usage import Ledgers

logger = logging.getLogger(__name__)

OPERATOR_BODY_BYTES = 1 << 20
"""The most of a body that holds names and numbers, read in the event loop."""


@dataclass(slots=True)
class Access:
    """Who may ask, and how much at once."""

    tenants: Tenants
    guard: RouteGuard
    shares: Shares
    limits: TenantLimits
    budgets: Budgets
    front_door: FrontDoor
    drain: Drain
    admin: TenantAdmin

    @property
    def registry(self) -> TenantRegistry:
        """The tenants of the settings and of the database."""
        return self.admin.registry

    def configure(self, config: AppConfig) -> None:
        """Use other tenants and limits; running requests keep their old ones."""
        self.tenants.configure(
            config.tenants, config.operator_key_sha256, config.aliases, refusal=self.registry.refusal
        )
        self.shares.set_weights(config.cache_shares)
        self.limits.configure(config.tenants)
        self.front_door.configure(config.max_queued_requests, BODIES * config.max_body_bytes)
        self.guard.configure(config.allowed_hosts, config.allowed_origins)


@dataclass(slots=True)
class Catalog:
    """What is served: a model, its adapters, and registered prompts. ``base_model``: its description for clients."""

    base_model: dict[str, Any]
    tokenizer: PromptTokenizer
    preparer: Preparer
    adapters: AdapterRegistry
    adapter_admin: AdapterAdmin
    prompts: Prompts
    prompt_admin: PromptAdmin

    async def replace_prompts(self, config: AppConfig) -> None:
        """Use other public prompts. Raises the errors of ``Prompts.replace``, and changes nothing then."""
        await self.prompts.replace(self.tokenizer, config.public_prompts)

    def configure(self, config: AppConfig) -> None:
        """Use other limits of generations."""
        self.adapter_admin.configure(config)
        self.preparer.configure(limits_of(config, self.base_model["max_model_len"]))


@dataclass(slots=True)
class Fleet:
    """A model's replicas and the other ingresses. ``connecting`` is done once they answer.

    ``board``: the name of the notice board; ``prefix``: of its figures for autoscaling. ``posting``: what the replicas
    learn of tenants.
    """

    core: RoutingCore
    broadcast: Broadcast
    receiver: TokenReceiver
    connecting: asyncio.Task[None]
    sessions: SessionList
    board: str = ""
    prefix: str = ""
    posting: asyncio.Task[None] | None = None
    _synced: bool = False

    def ready(self) -> bool:
        """Return whether requests can be routed: every cache was known once. Later replicas change nothing."""
        if not self._synced and self.connecting.done():
            self._synced = self.core.knows_every_cache
        return self._synced and bool(self.core.replica_ids)


@dataclass(slots=True)
class Records:
    """What is counted, shown and kept. ``tables``: of tenants, as last told.

    ``stored``, ``batches`` None: no responses, no files and batches are stored.
    """

    metrics: figures.IngressMetrics
    live: Live
    usage: Ledgers
    history: MessageHistory
    journal: Journal
    tables: Shared
    tracer: Tracer | None = None
    stored: StoredResponses | None = None
    batches: BatchDesk | None = None


@dataclass(slots=True)
class Services:
    """One served model of an ingress. ``config``: its settings in force; ``refused_settings``: why the newest are not.

    ``several``: all models, or None: there is one.
    """

    config: AppConfig
    app_name: str
    name: str
    access: Access
    catalog: Catalog
    fleet: Fleet
    records: Records
    completions: Completions
    refused_settings: str = ""
    several: Models | None = None

    async def configure(self, config: AppConfig) -> None:
        """Apply other live settings; running requests keep their old ones."""
        # The steps that could fail are first. All others run between two requests.
        self.access.budgets.require_database(config.tenants)
        await self.catalog.replace_prompts(config)
        self.fleet.core.configure(RouterSettings.from_json(config.routing()))
        self.access.registry.declare(config)
        self._use(self.access.registry.in_force(config))

    def tenants_changed(self) -> None:
        """Put the tenants and keys that the registry knows in force, for every model."""
        for services in self.all:
            services._use(self.access.registry.in_force(services.config))
        if self.several is not None:
            self.several.metrics.expect(self.access.tenants.by_name)

    def _use(self, config: AppConfig) -> None:
        self.access.budgets.configure(config.tenants, config.prices)
        self.access.configure(config)
        self.records.metrics.expect(self.access.tenants.by_name)
        self.catalog.configure(config)
        self.completions.configure(config)
        if self.records.batches is not None:
            self.records.batches.worker.limits_changed()
        self.config = config

    @property
    def all(self) -> tuple[Services, ...]:
        """The services of every model of this ingress."""
        return (self,) if self.several is None else tuple(self.several.served.values())

    def has(self, model: str) -> bool:
        """Return whether ``of`` has services: during a rolling update, ingresses differ."""
        return self.several is None or model in self.several.served

    def of(self, model: str) -> Services:
        """Return the services of one of several models, "": of the only one. Raises KeyError."""
        return self if self.several is None else self.several.served[model]

    def ready(self) -> bool:
        """Return whether requests can be answered, by a replica that runs or one that starts for them."""
        return (self.fleet.ready() or self.asleep) and not self.access.tenants.refusal

    @property
    def deployment(self) -> tuple[str, str]:
        """The names of the application and of the deployment of this model's replicas."""
        return self.app_name, self.fleet.broadcast.replica.deployment_name

    @property
    def may_answer(self) -> bool:
        """Whether a replica can answer a request, now or once it has started for it."""
        return bool(self.fleet.core.replica_ids) or self.config.first_replicas == 0

    @property
    def asleep(self) -> bool:
        """Whether the model has no replica until a request comes."""
        return self.config.first_replicas == 0 and not self.fleet.core.replica_ids

    def settings_refused(self, why: str) -> None:
        """Note why the newest settings are not in force, "" if they are."""
        self.refused_settings = why

    async def body(self, request: Request, most_bytes: int = OPERATOR_BODY_BYTES) -> bytes:
        """Return the request's body. Raises RequestTooLarge and RequestTimeout."""
        return await read_body(request, min(most_bytes, self.config.max_body_bytes))

    def models(self, request: Request) -> list[dict[str, Any]]:
        """Return the caller's models, of all that this ingress serves."""
        return self.own_models(request) if self.several is None else self.several.listed(request)

    def own_models(self, request: Request) -> list[dict[str, Any]]:
        """Return the caller's names of this model; operators, and callers of an open deployment, see full paths."""
        operator = self.access.tenants.is_operator(credentials(request))
        tenant = None if operator else self.access.guard.tenant(request)
        names = None if tenant is None else tenant.models
        specs = self.catalog.adapters.visible(None if tenant is None else tenant.name, names)
        shows_paths = self.access.guard.sees_all(request)
        roots = (spec.path if shows_paths else PurePath(spec.path).name for spec in specs)
        base = self.catalog.base_model
        adapters = [adapter_body(spec.name, root, base) for spec, root in zip(specs, roots, strict=True)]
        if self.catalog.adapters.base_visible(names):
            shown = [base, *adapters]
        else:
            shown = [{**adapter, "parent": None} for adapter in adapters]
        by_name, aliases = {one["id"]: one for one in shown}, self.access.tenants.aliases
        return shown + [{**by_name[name], "id": alias} for alias, name in aliases.items() if name in by_name]

    def autoscaling_stats(self) -> dict[str, float]:
        """Return this ingress' figures for the models' autoscaling policies; none where that is off. Never raises."""
        try:
            return {name: value for services in self.all for name, value in services._scaling().items()}
        except Exception:  # after an error, Serve would stop asking
            logger.exception("no figures for autoscaling")
            return {}

    def _scaling(self) -> dict[str, float]:
        if self.config.autoscaling is None:
            return {}
        times, working_set_tokens = self.fleet.core.demand()
        door = self.access.front_door
        # Without a replica, those with a place wait too.
        waiting = door.waiting().total() if self.fleet.core.replica_ids else door.asking()
        told = IngressFigures(
            waiting_requests=waiting,
            working_set_tokens=working_set_tokens,
            **asdict(times),
            **self.config.autoscaling.model_dump(),
        ).to_floats()
        return {f"{self.fleet.prefix}{name}": value for name, value in told.items()}

    def samples(self) -> list[Sample]:
        """Return the samples of this ingress and its routers; of several models, each with the model's name."""
        samples = self.own_samples() if self.several is None else self.several.samples()
        return [*samples, *LOOPS.samples()]

    def own_samples(self) -> list[Sample]:
        """Return the samples of this model alone."""
        streams = figures.samples_of({"warmpath_event_streams": self.records.live.watchers})
        samples = [*self.records.metrics.samples(), *figures.router_samples(self.fleet.core), *streams]
        samples += self.access.front_door.samples()
        versions, _ = self.catalog.prompt_admin.traffic.report()
        return [*samples, *version_samples(versions)]

    @property
    def _everywhere(self) -> Broadcast:
        return self.several.broadcast if self.several is not None else self.fleet.broadcast

    def other_versions(self) -> dict[str, int]:
        """Return the replicas and ingresses whose messages this release does not read, and their versions."""
        known = {name: version for each in self.all for name, version in each.fleet.core.other_versions.items()}
        return known | self._everywhere.other_versions()

    def failing(self) -> dict[str, str]:
        """Return the loops of this ingress and of the replicas that failed lately: a name, and what is known of it."""
        found = LOOPS.failing()
        for services in self.all:
            for replica_id, report in services.fleet.core.stats().items():
                for name, labels, value in report.samples:
                    if value and name == FAILING:
                        found[f"{replica_id}: {labels[0][1]}"] = "see the replica's log"
        return found

    async def all_samples(self) -> list[Sample]:
        """Return the samples of every ingress and every replica."""
        samples: list[Sample] = []
        for services in self.all:
            more = figures.replica_samples(services.fleet.core)
            if services.config.autoscaling is not None:
                notices = await asyncio.to_thread(read, services.fleet.board, "autoscaling")
                more += figures.autoscaling_samples(notices)
            samples += more if self.several is None else figures.with_label(more, "model", services.config.model_name)
        ingresses = await self._everywhere.ingresses("named_samples", timeout_s=5) or [(self.name, self.samples())]
        for name, more in ingresses:
            samples += figures.with_label(more, "ingress", name)
        return samples

    def tenant_counts(self, windows_s: Sequence[int]) -> list[dict[str, Bucket]]:
        """Return what was counted at this ingress in spans up to now, of all models, by tenant."""
        tallies = [each.records.metrics for each in self.all]
        if self.several is not None:  # what chose no model
            tallies.append(self.several.metrics)
        now_s = time.time()
        found: list[dict[str, Bucket]] = []
        for window_s in windows_s:
            sums: dict[str, Bucket] = {}
            for tally in tallies:
                for tenant, bucket in sums_of(tally.rings, now_s, window_s).items():
                    sums.setdefault(tenant, Counter()).update(bucket)
            found.append(sums)
        return found

    async def tenant_table(self, viewer: str | None, window_s: int) -> dict[str, Any]:
        """Return what tenants send, wait for and hold; of one tenant or (None) of all. Readers at once share it."""
        return await self.records.tables.of((viewer, window_s), lambda: self._tenant_table(viewer, window_s))

    async def _tenant_table(self, viewer: str | None, window_s: int) -> dict[str, Any]:
        windows_s, now_s = (window_s, WINDOWS_S[0]), time.time()
        told = await self._everywhere.ingresses("tenant_counts", windows_s, timeout_s=5)
        counts, minute = zip(*(told or [self.tenant_counts(windows_s)]), strict=True)
        today = datetime.now(UTC).date().isoformat()
        usage = await self.records.usage.everywhere(today, today, viewer)
        prices = self.access.budgets.prices
        spent = spent_today(usage, prices) if prices else {}
        budgets = {one["tenant"]: one for one in await self.access.budgets.told(viewer)}
        pools = [held_tokens(each.reports, each.config.block_size) for each in self.all]
        held, pool = Counter[str](), sum(tokens for _, tokens in pools)
        for one, _ in pools:
            held.update(one)
        names = self.access.tenants.by_name
        begin_s = begin_of(now_s, window_s)
        rows = tenant_rows(counts, names if viewer is None else [viewer], now_s - begin_s, viewer)
        for row in rows:
            tenant = row["tenant"]
            if pool:
                row["kv_tokens"] = held[tenant]
                if tenant in names:
                    row["kv_share_tokens"] = int(pool * self.access.shares.fraction(tenant, among=names))
            row |= {name: found[tenant] for name, found in (("budget", budgets), ("today", spent)) if tenant in found}
        of_operators = {"kv": {"pool_tokens": pool, "held_tokens": dict(held)}} if viewer is None and pool else {}
        return {
            "object": "tenants.stats",
            "viewer": "operator" if viewer is None else "tenant",
            "at_s": round(now_s, 3),
            "window_s": window_s,
            "since_s": begin_s,
            "data": rows,
            "refusals": refusals_by_tenant(minute, viewer),
            **of_operators,
        }

    async def tenant_requests(self, tenant: str, *, operator: bool) -> list[RequestRow]:
        """Return a tenant's latest requests at all ingresses, newest first."""
        found = await self._everywhere.ingresses("tenant_requests", tenant, timeout_s=5)
        return latest([row for rows in found or [self.records.journal.of(tenant)] for row in rows], operator=operator)

    @property
    def reports(self) -> list[Sequence[Sample]]:
        """The latest samples of each replica."""
        return [report.samples for report in self.fleet.core.stats().values()]

    async def close_sessions(self, tenant: str, names: Sequence[str]) -> int:
        """End a tenant's sessions of some names everywhere; return how many replicas had one. Raises Overloaded."""
        if not await self._everywhere.ingresses("close_sessions", tenant, names, timeout_s=5):
            self.access.limits.close_sessions(tenant, names)
        return sum([await each.fleet.sessions.close(tenant, names) for each in self.all])

    async def explanation(self, body: bytes) -> dict[str, Any]:
        """Return where the request in a body would go now. Raises the errors of ``reports.explanation``."""
        tenants = self.access.tenants
        one = self if self.several is None else self.several.explained(*names_in(body, tenants))
        return await explanation(body, one.fleet.core, one.catalog.preparer, tenants, one.access.front_door)

    async def cache_state(self) -> dict[str, Any]:
        """Return the content of the caches, as this ingress' router sees it."""
        model, engine = self.config.model_name, self.config.engine
        notices = await asyncio.to_thread(read_shown, self.fleet.board)
        return cache_state(
            self.fleet.core,
            self.records.metrics.totals(),
            self.catalog.tokenizer.stats(),
            notices,
            model=model,
            engine=engine,
        )


def limits_of(config: AppConfig, model_len: int) -> Limits:
    """Return the limits of generations, in tokens, and of saves; ``model_len``: the model's maximum length."""
    return Limits(model_len, config.default_max_tokens, config.save_ttl_s)
