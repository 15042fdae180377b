"""Builds an address: what its models share, then each model. Server and tests call ``make_address``."""

import asyncio
import ctypes
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from serve_app.api.anthropic.history import MessageHistory
from serve_app.budgets import Budgets
from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.config.app import AppConfig
from serve_app.errors import LimitReason, WarmpathError
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.levels import Levels
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.ingress.address import Address
from serve_app.ingress.batches import BatchDesk, ModelGate
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.model import Model
from serve_app.ingress.observe.answer_meter import Observers
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.observe.reports import FinalSessions
from serve_app.ingress.observe.traffic import TrafficObserver
from serve_app.ingress.outside import Outside
from serve_app.ingress.shared import BODIES
from serve_app.ingress.tenant_admin import TenantAdmin
from serve_app.ingress.traffic_log import TrafficLog
from serve_app.live.journal import Journal
from serve_app.sessions import SessionLimit
from serve_app.stored.database import StorageLimits
from serve_app.stored.objects import StoredObjects
from serve_app.stored.responses import StoredResponses
from serve_app.stored.url import URL_VARIABLE
from serve_app.tenancy.registry import TenantRegistry
from serve_app.tenants import Tenants
from serve_app.usage import Ledger, Ledgers

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
"""Source: glibc's malloc.h. Once set, malloc no longer raises it to the size of the largest freed buffer."""


async def make_address(config: AppConfig, outside: Outside) -> Address:
    """Build an address; its routers connect in the background.

    One of several models that cannot be served leaves the others. Raises CheckpointError if none can be.
    """
    served = config.served()
    address = await _without_models(config, served, outside)
    final_sessions = FinalSessions(address.close_sessions)
    for name, own in served.items():
        own = address.registry.in_force(own)
        try:
            loaded = await asyncio.to_thread(outside.load, own, address.workers)
            address.models[name] = Model(own, loaded, address, outside, address.taken, final_sessions)
        except (ValueError, OSError) as error:
            if not config.models:
                raise
            logger.exception("the model %s is not served", name)
            address.down[name] = str(error)
    if not address.models:
        raise CheckpointError("; ".join(f"{name}: {why}" for name, why in address.down.items()))
    address.registry.start(address.tenants_changed)
    address.traffic_log.configure(address.config)
    return address


async def _without_models(config: AppConfig, served: Mapping[str, AppConfig], outside: Outside) -> Address:
    return_large_buffers()
    secret = outside.secret(config)
    models: dict[str, Model] = {}
    # Its threads' shares are those of the requests below, once the tenants in its database are known.
    shares, bounds = Shares({}), StorageLimits(config.responses_ttl_s, config.responses_max_bytes)
    store_workers, drain = FairWorkers(shares), Drain()
    database = await outside.database(config, bounds)
    objects: StoredObjects | None = None
    if database is not None:
        objects = StoredObjects(database, secret, store_workers, replace(bounds, max_bytes=config.files_max_bytes))
    registry = await _registry(objects, config)
    config = registry.in_force(config)
    tenants = _tenants(config, registry, secret)
    shares.set_weights(config.cache_shares)
    broadcast = outside.broadcast(config, next(iter(served)), "")
    budgets = Budgets(config.tenants, config.prices, objects, config.ingress_replicas)
    budgets.start()
    ledger = await asyncio.to_thread(Ledger, config.usage_file, config.block_size, [budgets.count])
    traffic = TrafficObserver()
    metrics = IngressMetrics([budgets.samples, traffic.counts.samples])
    metrics.expect(tenants.by_name)
    journal = Journal(lambda: len(tenants.by_name))
    observers = Observers(refused=[metrics.refused, journal.refused, partial(_refused_at_all, models)])
    observers += traffic.observers("" if config.models else config.model_name)
    levels = Levels(outside.name, config.ingress_replicas, broadcast.levels)
    session_limit = SessionLimit(levels, config.block_size, partial(_prefill_tokens_per_s, models))
    limits = TenantLimits(
        config.tenants, config.ingress_replicas, levels=levels, checks=[budgets.check, session_limit.check]
    )
    batches: BatchDesk | None = None
    if objects is not None and config.files_max_bytes:
        gates = partial(_gates, models)
        batches = BatchDesk(objects, outside.name, lambda: tenants.by_name, gates, lambda: tenants.aliases)
    stores = database is not None and config.store_responses
    return Address(
        config=config,
        outside=outside,
        name=outside.name,
        secret=secret,
        models=models,
        fallbacks={name: own.fallback for name, own in served.items() if own.fallback is not None},
        tenants=tenants,
        tenant_admin=TenantAdmin(registry, broadcast),
        guard=RouteGuard(tenants, metrics, drain, limits, config.allowed_hosts, observers, config.allowed_origins),
        shares=shares,
        limits=limits,
        session_limit=session_limit,
        budgets=budgets,
        workers=FairWorkers(shares),
        drain=drain,
        metrics=metrics,
        observers=observers,
        hall=FrontDoor(
            shares,
            places=lambda: 1,  # none is taken there
            max_waiting=config.max_queued_requests,
            max_bytes=BODIES * config.max_body_bytes,
            limits=limits,
        ),
        broadcast=broadcast,
        ledger=ledger,
        usage=Ledgers(ledger, broadcast.ingresses),
        history=MessageHistory(complete=config.ingress_replicas == 1),
        journal=journal,
        traffic=traffic,
        traffic_log=TrafficLog(outside.name, traffic, models, broadcast.ingresses),
        tracer=outside.tracer(config),
        stored=StoredResponses(database, secret, store_workers, bounds) if stores and database is not None else None,
        batches=batches,
    )


def _tenants(config: AppConfig, registry: TenantRegistry, secret: bytes) -> Tenants:
    tenants = Tenants(
        config.tenants,
        secret,
        operator_key_sha256=config.operator_key_sha256,
        aliases=config.aliases,
        refusal=registry.refusal,
    )
    if tenants.refusal:
        logger.error("every client is refused: %s", tenants.refusal)
    return tenants


# What is asked of all models, by what is built before them.


def _prefill_tokens_per_s(models: Mapping[str, Model]) -> float:
    """Return the prefill rate of a replica of the fastest model, 0.0 while unknown."""
    return max((model.core.loads.prefill_tokens_per_s for model in models.values()), default=0.0)


def _gates(models: Mapping[str, Model]) -> list[ModelGate]:
    return [model.gate for model in models.values()]


def _refused_at_all(models: Mapping[str, Model], tenant: str, reason: LimitReason) -> None:
    for model in models.values():
        model.live.refused(tenant, reason)


async def _registry(objects: StoredObjects | None, config: AppConfig) -> TenantRegistry:
    """Return the tenants of the settings and of the database, read now if that answers."""
    registry = TenantRegistry(objects, config)
    try:
        await registry.look()
        # What is at the default place may be the database of another deployment of the same user.
        if config.tenants and (os.environ.get(URL_VARIABLE) or config.responses_file is not None):
            await registry.remember()
        await registry.note_lives()
    except WarmpathError as error:
        logger.warning("tenants and keys: %s", error.message)
    return registry


def return_large_buffers() -> bool:
    """Make malloc map buffers over ``LARGE_BYTES`` separately in this process; return False without glibc's malloc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
